"""One object as the operator sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tknp.errors import InvalidValue
from tknp_operator.api.spec import NAME, Spec


@dataclass(frozen=True)
class Service:
    """`prior`: the status that it carries, as the API server gave it."""

    name: str
    namespace: str
    uid: str
    generation: int
    deleting: bool
    finalizers: tuple[str, ...]
    spec: Spec
    prior: Mapping[str, Any]


def parse(obj: Mapping[str, Any]) -> Service:
    """Read a TokenParallelService. Raises InvalidValue naming field, value and remedy."""
    meta = obj["metadata"]
    if not NAME.holds(meta["name"]):
        raise InvalidValue("metadata.name", meta["name"], NAME.message)
    return Service(
        meta["name"], meta["namespace"], meta.get("uid", ""), meta.get("generation", 1),
        "deletionTimestamp" in meta, tuple(meta.get("finalizers", ())),
        parse_spec(obj.get("spec") or {}), obj.get("status") or {},
    )  # fmt: skip


def parse_spec(spec: Mapping[str, Any]) -> Spec:
    """Read its spec alone. Raises InvalidValue."""
    try:
        return Spec.model_validate(dict(spec))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = "spec"
        for part in first["loc"]:
            field += f"[{part}]" if isinstance(part, int) else f".{part}"
        value = None if first["type"] == "missing" else first["input"]
        remedy = first["msg"].removeprefix("Value error, ")
        remedy = {"missing": "is required",
                  "extra_forbidden": "unknown: remove it"}.get(first["type"], remedy)  # fmt: skip
        raise InvalidValue(field, value, remedy) from None
