"""HOP-B: Helix's worked example, by scheduling its program with the example's costs.

Eight requests, 2 units of attention and 1.2 of exchange each: 25.6 in lockstep, about 17 when one
request's exchange runs under the next one's attention (hx.hopb_seq, hx.hopb).
"""

from __future__ import annotations

from typing import Any

import pytest

from tknp.layout.derive import derive
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind, Program
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy

COMPUTE, EXCHANGE, REQUESTS = 2.0, 1.2, 8


def _time(program: Program) -> float:
    """One layer at one rank: a core that attends and a link that carries one exchange at a time."""
    now = link = 0.0
    arrived: dict[tuple[int, int], float] = {}
    for op in program:
        rows = op.start, op.stop
        match op.kind:
            case Kind.ATTEND:
                now += COMPUTE * op.rows
            case Kind.EXCHANGE:
                link = max(link, now) + EXCHANGE * op.rows
                arrived[rows] = link
            case Kind.MERGE:
                now = max(now, arrived.pop(rows))
    assert not arrived, "an exchange that no merge waits for"
    return now


@pytest.fixture
def at_overlap(llama_405b: Any) -> Any:
    def program(overlap: int) -> Program:
        layout = make_layout(
            llama_405b, "bfloat16", 8, [NodeSpec(0)] * 8, strategy=Strategy.HELIX, overlap=overlap
        )
        groups = (Group(tuple(range(8)), 0, REQUESTS),)
        return tuple(op for op in derive(layout, 0, groups, Rank(2, 5)) if op.layer == 7)

    return program


def test_lockstep_takes_25_6_units(at_overlap: Any) -> None:
    assert _time(at_overlap(1)) == pytest.approx(25.6)


def test_overlap_by_request_takes_about_17_units(at_overlap: Any) -> None:
    """All attention, and the last request's exchange alone stays exposed."""
    assert _time(at_overlap(8)) == pytest.approx(17.2)
    assert _time(at_overlap(8)) == pytest.approx(17, rel=0.02)


def test_coarser_overlap_exposes_the_exchange_of_its_last_part(at_overlap: Any) -> None:
    assert _time(at_overlap(2)) == pytest.approx(16 + 4 * 1.2)
    assert _time(at_overlap(4)) == pytest.approx(16 + 2 * 1.2)


def test_more_parts_than_rows_are_one_a_row(at_overlap: Any) -> None:
    assert at_overlap(99) == at_overlap(8)
