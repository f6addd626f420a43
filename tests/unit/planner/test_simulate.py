"""The simulation obeys the rules of transports, and times what can be timed by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig
from tknp.planner.prices import Free
from tknp.planner.simulate import Deadlock, Mismatch, Programs, simulate
from tknp.planner.spans import Span
from tknp.planner.step import make_step

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, layers=4, q_heads=8, kv_heads=2,
    head_dim=8, max_position=64,
)  # fmt: skip
POOLS: list[dict[str, Any]] = [
    {},
    {"copies": 2},
    {"microbatches": 2},
    {"strategy": Strategy.DP},
    {"strategy": Strategy.PP},
    {"strategy": Strategy.DCP},
    {"strategy": Strategy.HELIX, "overlap": 3},
]


def _layout(nodes: int = 4, tp: int = 2, **options: Any) -> Layout:
    return make_layout(CONFIG, "float32", tp, [NodeSpec(10**9)] * nodes, **options)


def _streams(layout: Layout, batch: int = 8, width: int = 1) -> list[Programs]:
    return list(make_step(layout, batch, 16, width).programs)


class Priced(Free):
    """One second an attended row and an operation of any other kind of work, as given."""

    def __init__(self, attend_s: float, exchange_s: float) -> None:
        self._attend_s = attend_s
        self._exchange_s = exchange_s

    def compute_s(self, rank: Rank, stream: int, op: Op) -> float:
        return self._attend_s * op.rows if op.kind is Kind.ATTEND else 0.0

    def transfer_s(self, transfer: Transfer) -> tuple[float, float]:
        moved = transfer.what == "attention"
        return self._exchange_s * (transfer.stop - transfer.start) * moved, 0.0


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("options", POOLS, ids=str)
def test_every_strategy_ends_on_the_worst_transport(options: dict[str, Any], turns: bool) -> None:
    layout = _layout(**options)
    streams = _streams(layout)
    spans = simulate(
        streams, Priced(1.0, 1.0), steps=3, buffered=False, layout=layout if turns else None
    )  # fmt: skip
    assert {(span.stream, span.step) for span in spans} == {
        (stream, step) for stream in range(len(streams)) for step in range(3)
    }


def test_requests_of_several_owners_end_too() -> None:
    streams = _streams(_layout(), width=3)
    assert any(op.kind is Kind.MERGE for p in streams[0].values() for op in p)
    assert simulate(streams, Priced(1.0, 1.0), buffered=False)


@pytest.mark.parametrize(("groups", "units"), [(1, 25.6), (8, 17.2)])
def test_hop_b_hides_all_but_the_last_exchange(groups: int, units: float) -> None:
    """hx.hopb_seq, hx.hopb: 8 requests, 2 units of attention and 1.2 of exchange each."""
    layout = _layout(nodes=2, tp=1, strategy=Strategy.HELIX, overlap=groups)
    one_layer = [
        {rank: tuple(op for op in p if op.layer == 0) for rank, p in programs.items()}
        for programs in _streams(layout)
    ]
    spans = simulate(one_layer, Priced(2.0, 1.2))
    assert max(span.end_s for span in spans) == pytest.approx(units)


def test_one_resource_a_rank_and_one_transfer_a_link() -> None:
    spans = simulate(_streams(_layout(microbatches=2)), Priced(1.0, 0.25), steps=2)
    for rank in _layout().ranks():
        attends = sorted(
            (s.start_s, s.end_s) for s in spans if s.rank == rank and s.kind is Kind.ATTEND
        )
        assert all(before[1] <= after[0] for before, after in pairwise(attends))


@pytest.mark.parametrize("delays", [(0.0, 0.0), (0.0, 1.5), (2.5, 0.0)])
def test_offset_streams_that_begin_together_come_apart(delays: tuple[float, ...]) -> None:
    """Dense work alone takes time, one second a layer: two of two nodes are busy all along."""

    class Dense(Free):
        def compute_s(self, rank: Rank, stream: int, op: Op) -> float:
            return 1.0 if op.kind is Kind.PROJECT else 0.0

    layout = _layout(nodes=2, tp=1, microbatches=2)
    spans = simulate(_streams(layout), Dense(), steps=9, layout=layout, starts_s=delays)
    layers, steps = CONFIG.layers, 9 * 2
    assert max(s.end_s for s in spans) <= max(delays) + layers * (steps + 1) / 2


def test_steps_of_a_stream_follow_each_other() -> None:
    spans = simulate(_streams(_layout()), Priced(1.0, 0.0), steps=3)
    first = Rank(_layout().first_root(0), 0)

    def of(step: int) -> list[Span]:
        return [s for s in spans if s.rank == first and s.step == step]

    for step in range(2):
        assert max(s.end_s for s in of(step)) <= min(s.start_s for s in of(step + 1))


def test_ranks_left_out_are_taken_to_be_in_step() -> None:
    streams = _streams(_layout())
    some = [{rank: p for rank, p in streams[0].items() if rank.t == 0}]
    prices = Priced(1.0, 0.5)
    whole, part = simulate(streams, prices), simulate(some, prices)
    assert max(s.end_s for s in part) == max(s.end_s for s in whole)


# --- broken programs, as in the tests of layouts ----------------------------------------------


@pytest.fixture
def healthy() -> dict[Rank, Program]:
    return dict(_streams(_layout(nodes=2, tp=1))[0])


def _run(programs: Programs) -> None:
    simulate([programs], Free(), buffered=False)


def _find(program: Program, kind: Kind) -> int:
    return next(i for i, op in enumerate(program) if op.kind is kind)


def test_swapped_order_is_detected(healthy: dict[Rank, Program]) -> None:
    owner = Rank(1, 0)
    scatter, attend, gather, *rest = healthy[owner]
    healthy[owner] = (gather, attend, scatter, *rest)
    with pytest.raises(Deadlock, match="scatter of layer 0"):
        _run(healthy)


def test_a_missing_rank_is_detected(healthy: dict[Rank, Program]) -> None:
    healthy[Rank(1, 0)] = healthy[Rank(1, 0)][:1]
    with pytest.raises(Deadlock):
        _run(healthy)


@pytest.mark.parametrize("kind", [Kind.SCATTER, Kind.GATHER, Kind.HANDOFF, Kind.FEEDBACK])
def test_a_dropped_end_is_detected(kind: Kind, healthy: dict[Rank, Program]) -> None:
    for rank, program in healthy.items():
        at = _find(program, kind)
        dropped = replace(program[at], sends=(), recvs=())
        with pytest.raises((Deadlock, Mismatch)):
            _run({**healthy, rank: (*program[:at], dropped, *program[at + 1 :])})


@pytest.mark.parametrize("change", [{"start": 1}, {"width": 7}, {"item_bytes": 2}], ids=str)
def test_ends_that_disagree_are_detected(
    change: dict[str, Any], healthy: dict[Rank, Program]
) -> None:
    owner = Rank(1, 0)
    at = _find(healthy[owner], Kind.SCATTER)
    op = healthy[owner][at]
    wrong = replace(op, recvs=tuple(replace(t, **change) for t in op.recvs))
    healthy[owner] = (*healthy[owner][:at], wrong, *healthy[owner][at + 1 :])
    with pytest.raises(Mismatch):
        _run(healthy)


def test_a_send_that_nobody_takes_is_detected_even_if_buffered(
    healthy: dict[Rank, Program],
) -> None:
    owner = Rank(1, 0)
    programs = {**healthy, owner: (*healthy[owner], healthy[owner][2])}
    with pytest.raises((Deadlock, Mismatch)):
        simulate([programs], Free())


def test_all_reduces_that_disagree_are_detected() -> None:
    programs = dict(_streams(_layout(nodes=1))[0])
    at = _find(programs[Rank(0, 1)], Kind.ALL_REDUCE)
    program = programs[Rank(0, 1)]
    wrong = replace(program[at], operand_bytes=1)
    programs[Rank(0, 1)] = (*program[:at], wrong, *program[at + 1 :])
    with pytest.raises(Mismatch):
        _run(programs)
