"""A rule is one in CEL, which the API server evaluates, and in Python, which the parser does.

Both are asked about many combinations; each combination that the fields' own types allow is given
to every rule of its mapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import pytest

from tknp_operator.api.decode import Decode
from tknp_operator.api.rules import Part
from tknp_operator.api.serving import Gateway, Prefill, PrefillScaling
from tknp_operator.api.source import Source
from tknp_operator.api.spec import NAME, Spec

cel = pytest.importorskip("cel", reason="pip install common-expression-language")

ROLES = (
    [], ["decode-root", "attention-owner"], ["decode-root"] * 2, ["attention-owner"] * 2,
    ["decode-node", "decode-root", "attention-owner", "decode-node"],
)  # fmt: skip
SCALING = (None, {"maxReplicas": 2}, {"minReplicas": 3, "maxReplicas": 2}, {"maxReplicas": 4})
MODEL = {"source": {"builtin": "smollm2"}}


def choices(**values: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    """Every combination, None left out."""
    for combination in product(*values.values()):
        yield {key: v for key, v in zip(values, combination, strict=True) if v is not None}


CASES: dict[type[Part], list[dict[str, Any]]] = {
    Source: list(choices(
        pvc=(None, {"claimName": "c"}), hostPath=(None, {"path": "/m"}),
        image=(None, {"reference": "r"}), builtin=(None, "smollm2"),
        objectStore=(None, {"uri": "s3://b/p", "claimName": "c"}),
    )),
    Decode: list(choices(
        nodes=(1, 2, 3, 4), copies=(None, 2), microbatches=(None, 1, 2, 3), width=(None, 2, 4),
        strategy=("tknp", "pp", "tp", "helix"), roles=ROLES,
    )) + list(choices(nodes=(1,), device=("cpu", "cuda"), gpuProducts=(None, [], ["H100"]))),
    PrefillScaling: list(choices(minReplicas=(None, 1, 3), maxReplicas=(1, 2, 3))),
    Prefill: list(choices(replicas=(None, 3), maxReplicas=(None, 2, 4), autoscaling=SCALING)),
    Gateway: list(choices(enabled=(None, True, False), autoscaling=SCALING,
                          ray=(None, "auto", "rayService"), tlsSecret=(None, "t"))),
    Spec: list(choices(
        image=("i",), model=(MODEL,),
        decode=tuple(choices(nodes=(1,), device=("cpu", "cuda"))),
        topology=tuple(choices(computeDomain=(None, True), rdmaResource=(None, "rdma/ib"))),
    )),
}  # fmt: skip


def unchecked(cls: type[Part], values: dict[str, Any]) -> Any:
    """The model of `values` with its defaults, whatever its rules say."""
    fields = {}
    for name, field in cls.model_fields.items():
        if field.alias in values:
            value = values[field.alias]
            inner = next((kind for kind in (field.annotation, *get_args(field.annotation))
                          if isinstance(kind, type) and issubclass(kind, Part)), None)  # fmt: skip
            fields[name] = unchecked(inner, value) if inner else value
    return cls.model_construct(**fields)


def shown(model: Any) -> Any:
    """As the API server has it: defaults filled in, what is unset absent."""
    return model.model_dump(by_alias=True, exclude_none=True, warnings=False)


@pytest.mark.parametrize("cls", CASES, ids=lambda cls: cls.__name__)
def test_cel_and_python_say_the_same(cls: type[Part]) -> None:
    said: dict[str, set[bool]] = {rule.message: set() for rule in cls.rules}
    for values in CASES[cls]:
        model = unchecked(cls, values)
        for rule in cls.rules:
            holds = bool(rule.holds(model))
            assert cel.evaluate(rule.cel, {"self": shown(model)}) is holds, (rule.message, values)
            said[rule.message].add(holds)
    assert all(answers == {True, False} for answers in said.values()), said


def test_every_mapping_with_rules_is_here() -> None:
    def below(cls: type[Part]) -> Iterator[type[Part]]:
        for sub in cls.__subclasses__():
            yield sub
            yield from below(sub)

    with_rules = {cls.rules for cls in below(Part) if cls.rules}
    assert with_rules == {cls.rules for cls in CASES}


@pytest.mark.parametrize("name", ["demo", "a", "a-1", "Demo", "a.b", "-a", "a-", "1a", "a_b"])
def test_names_are_one_too(name: str) -> None:
    holds = bool(NAME.holds(name))
    assert cel.evaluate(NAME.cel, {"self": {"metadata": {"name": name}}}) is holds
