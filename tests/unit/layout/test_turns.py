"""The order in which streams root at a node, and that every rank derives it alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from tknp.layout.program import Kind, Op
from tknp.layout.turns import Turns

SPLIT = (0, 0, 1, 1, 1)  # root of each layer; node 0 draws tokens
EMBED, SAMPLE, FEEDBACK = (Op(kind, 0, 1) for kind in (Kind.EMBED, Kind.SAMPLE, Kind.FEEDBACK))


def visits(turns: Turns, stream: int, steps: int, ops: Iterable[Op]) -> set[tuple[float, str]]:
    """Virtual times of all visits of `steps` steps of `stream`, named like A0."""
    times = {
        (turns.time(stream, step, op), f"{'AB'[stream]}{step}")
        for step in range(steps)
        for op in ops
    }
    return {(time[0], name) for time, name in times if time is not None}


def order(routes: Sequence[Sequence[int]], samplers: Sequence[int], node: int) -> list[str]:
    turns = Turns(routes, samplers, node)
    ops = [Op(Kind.PROJECT, 0, 1, layer) for layer in range(len(SPLIT))] + [SAMPLE]
    both = visits(turns, 0, 2, ops) | visits(turns, 1, 2, ops)
    return [name for _, name in sorted(both)]


def test_offset_microbatches_alternate_at_each_node() -> None:
    """At node 0 a step's tokens are drawn right before the next one's first block."""
    assert order((SPLIT, SPLIT), (0, 0), 0) == ["A0", "B0", "A0", "A1", "B0", "B1", "A1", "B1"]
    assert order((SPLIT, SPLIT), (0, 0), 1) == ["A0", "B0", "A1", "B1"]


def test_dual_roots_are_at_different_nodes() -> None:
    other = tuple(1 - root for root in SPLIT)
    assert order((SPLIT, other), (0, 1), 0)[:4] == ["A0", "B0", "A0", "A1"]
    assert order((SPLIT, other), (0, 1), 1)[:4] == ["B0", "A0", "B0", "B1"]


def test_a_visit_lasts_until_the_stream_leaves_the_node() -> None:
    turns = Turns((SPLIT,), (0,), 0)
    here, away = Op(Kind.FINISH, 0, 1, 1), Op(Kind.ATTEND, 0, 1, 2)
    assert turns.time(0, 3, None) == turns.time(0, 3, EMBED) == turns.time(0, 3, here) == (15, 0)
    assert turns.time(0, 3, away) == turns.time(0, 3, SAMPLE) == (20, 0)
    assert turns.time(0, 3, FEEDBACK) is None
    assert Turns((SPLIT,), (0,), 1).time(0, 3, SAMPLE) is None


def test_turns_follow_from_the_order_of_steps_alone() -> None:
    turns = Turns((SPLIT, SPLIT), (0, 0), 0)
    assert [turns.next_turn(stream) for stream in (0, 0, 1, 1, 0, 1)] == [0, 1, 0, 1, 2, 2]
    assert [turns.next_turn(0) for _ in range(10)] == list(range(3, 13))
    # Stream 1 has paused: it goes on beside the step under way, not ten turns before it.
    assert [turns.next_turn(stream) for stream in (1, 1, 0)] == [11, 12, 13]


@pytest.mark.parametrize(
    ("kind", "layer", "place"),
    [
        (Kind.EMBED, -1, 1), (Kind.PROJECT, 0, 1), (Kind.ATTEND, 3, 2), (Kind.ATTEND, 1, 3),
        (Kind.FINISH, 1, 4), (Kind.SAMPLE, -1, 4),
    ],
)  # fmt: skip
def test_short_work_that_others_wait_for_goes_first(kind: Kind, layer: int, place: int) -> None:
    assert Turns((SPLIT,), (0,), 0).place(0, Op(kind, 0, 1, layer)) == place
