"""What is sent as a step arrives as the same step."""

from __future__ import annotations

import pytest

from tknp.engine.batch import Admit, Delta, Grow
from tknp.errors import InvalidValue
from tknp.kv.holding import Key
from tknp.layout.shares import Shares
from tknp.rpc.convert import delta_from, delta_to, shares_from
from tknp.sampling.params import SamplingParams
from tknp.v1 import step_pb2

WIDE = Shares((4, 1), 37, interleave=3, unit=16)


def test_a_step_with_everything() -> None:
    admit = Admit(
        slot=3, key=Key("a", 2), owners=(4, 1), shares=WIDE, position=39, token=7,
        sampling=SamplingParams(max_tokens=9, presence_penalty=0.5, seed=11),
        prompt=(1, 2), generated=(5, 7), generated_count=2, pages=(8, 9),
    )  # fmt: skip
    grow = Grow(1, WIDE.grown((0,), 50, (2, 0)), pages=(3,))
    delta = Delta(6, 1, 99, ends=(0, 2), admits=(admit,), grows=(grow,))
    assert delta_from(step_pb2.Step.FromString(delta_to(delta).SerializeToString())) == delta


def test_an_empty_step() -> None:
    assert delta_from(delta_to(Delta(1, 0, 0))) == Delta(1, 0, 0)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"owners": []}, "owners"),
        ({"owners": [1, 1]}, "owners"),
        ({"interleave": 0}, "interleave"),
        ({"unit": 0}, "unit"),
        ({"phases": [step_pb2.SharesPhase(start=5, shards=[3])]}, "phases"),
    ],
)
def test_shares_that_are_none_are_refused(change: dict[str, object], field: str) -> None:
    usual: dict[str, object] = {"owners": [0, 1], "prompt": 5, "interleave": 2, "unit": 4}
    with pytest.raises(InvalidValue, match=field):
        shares_from(step_pb2.Shares(**{**usual, **change}))  # type: ignore[arg-type]
