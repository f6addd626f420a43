"""Seconds of steps by kind, role and part."""

from __future__ import annotations

import pytest

from tknp.engine.times import StepTimes, part_of, role_of
from tknp.layout.program import Kind, Op, Transfer
from tknp.layout.rank import Rank

MESSAGE = Transfer(Rank(0, 0), Rank(1, 0), 0, 1, 4, 4)


def op(kind: Kind, *, sends: bool = False) -> Op:
    return Op(kind, 0, 1, sends=(MESSAGE,) if sends else (), recvs=() if sends else (MESSAGE,))


@pytest.mark.parametrize(
    ("kind", "sends", "role", "part"),
    [
        (Kind.EMBED, False, "root", "dense"),
        (Kind.PROJECT, False, "root", "dense"),
        (Kind.SCATTER, True, "root", "exchange"),
        (Kind.SCATTER, False, "owner", "exchange"),
        (Kind.ATTEND, False, "owner", "attention"),
        (Kind.GATHER, True, "owner", "exchange"),
        (Kind.GATHER, False, "root", "exchange"),
        (Kind.FINISH, False, "root", "dense"),
        (Kind.OUTPUT, False, "root", "dense"),
        (Kind.MLP, False, "root", "dense"),
        (Kind.ALL_REDUCE, False, "root", "exchange"),
        (Kind.HANDOFF, True, "root", "exchange"),
        (Kind.HANDOFF, False, "root", "exchange"),
        (Kind.SAMPLE, False, "root", "dense"),
        (Kind.SAMPLE, True, "root", "dense"),
        (Kind.FEEDBACK, True, "root", "exchange"),
    ],
)
def test_where_an_operation_is_counted(kind: Kind, sends: bool, role: str, part: str) -> None:
    times = StepTimes("root")
    times.add(op(kind, sends=sends), 5.0, 2.0)
    times.finish(6.0)
    spent = {place: seconds for place, seconds in times.parts.items() if seconds}
    assert spent == {(role, part): 3.0, (role, "idle"): 2.0, ("root", "control"): 1.0}
    assert (role_of(kind, sends), part_of(kind)) == (role, part)
    assert {k: s for k, s in times.kinds.items() if s} == {kind: 5.0}


def test_every_kind_has_a_part() -> None:
    assert {part_of(kind) for kind in Kind} == {"dense", "attention", "exchange"}


def test_parts_show_finished_steps_only() -> None:
    times = StepTimes("owner")
    times.add(op(Kind.ATTEND), 1.0, 0.0)
    assert not any(times.parts.values())
    assert not any(times.kinds.values())
    times.finish(1.5)
    times.add(op(Kind.ATTEND), 1.0, 0.0)
    assert times.parts["owner", "attention"] == 1.0
    assert times.parts["owner", "control"] == 0.5
    times.finish(1.0)
    assert times.parts["owner", "attention"] == 2.0
    assert times.parts["owner", "control"] == 0.5


def test_parts_add_up_to_steps() -> None:
    times = StepTimes("root")
    for step in range(1, 4):
        for i, kind in enumerate(Kind):
            times.add(op(kind, sends=i % 2 == 0), 0.5 * i, 0.25 * i)
        times.finish(100.0 * step)
    assert sum(times.parts.values()) == 600.0
    assert all(seconds >= 0 for seconds in times.parts.values())
