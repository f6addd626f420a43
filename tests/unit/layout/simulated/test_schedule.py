"""No schedule of programs deadlocks, and the simulator that says so notices broken programs."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy

seeds = st.integers(0, 2**32)


@settings(max_examples=40)
@given(data=st.data(), seed=seeds)
def test_no_schedule_of_one_stream_deadlocks(
    data: st.DataObject, seed: int, any_steps: Any, simulator: Any
) -> None:
    step = data.draw(any_steps)
    lanes = simulator.separate([step.programs])
    finish = simulator(lanes, step.layout.tp, simulator.random_delays(seed)).run()
    assert set(finish) == ({0} if step.batch else set())


@settings(max_examples=40)
@given(data=st.data(), seed=seeds)
def test_no_schedule_of_several_streams_deadlocks(
    data: st.DataObject, seed: int, streams: Any, simulator: Any
) -> None:
    drawn = data.draw(streams)
    offsets = [data.draw(st.integers(0, 7)) for _ in drawn]
    programs = [step.programs for step in drawn]
    busy = {s for s, step in enumerate(drawn) if step.batch}
    tp, delays = drawn[0].layout.tp, simulator.random_delays(seed)
    for lanes in (simulator.separate(programs), simulator.merged(programs, offsets)):
        assert set(simulator(lanes, tp, delays).run()) == busy


@settings(max_examples=40)
@given(data=st.data(), seed=seeds)
def test_streams_on_lanes_of_their_own_do_not_wait_for_each_other(
    data: st.DataObject, seed: int, streams: Any, simulator: Any
) -> None:
    drawn = data.draw(streams)
    assume(drawn[0].batch)
    tp, delays = drawn[0].layout.tp, simulator.random_delays(seed)
    victim = data.draw(st.sampled_from(drawn[0].layout.ranks()))

    def stalled(rank: Rank, task: Any) -> float:
        return float(delays(rank, task)) + (1_000.0 if task.stream and rank == victim else 0.0)

    lanes = simulator.separate([step.programs for step in drawn])
    alone = simulator(simulator.separate([drawn[0].programs]), tp, delays).run()
    assert simulator(lanes, tp, stalled).run()[0] == alone[0]


def test_streams_on_one_lane_wait_for_each_other(
    make_step: Any, simulator: Any, two_nodes: Any
) -> None:
    programs = [make_step(two_nodes, (1, 1)).programs] * 2

    def stalled(rank: Rank, task: Any) -> float:
        return 1_000.0 if (task.stream, task.index) == (1, 0) else 1.0

    merged = simulator(simulator.merged(programs, [0, 0]), 1, stalled).run()
    separate = simulator(simulator.separate(programs), 1, stalled).run()
    assert merged[0] > 1_000 > separate[0]


def test_streams_in_turns_of_one_operation_deadlock(
    make_step: Any, simulator: Any, two_nodes: Any
) -> None:
    """Turns by operation are not one order: nodes without rows have fewer operations."""
    programs = [make_step(two_nodes, rows).programs for rows in ((1, 1), (1, 0))]
    lanes = {
        (rank, 0): [
            task
            for turn in zip_longest(*(simulator.tasks(p[rank], s) for s, p in enumerate(programs)))
            for task in turn
            if task
        ]
        for rank in two_nodes.ranks()
    }
    with pytest.raises(simulator.Deadlock):
        simulator(lanes, 1, simulator.random_delays(0)).run()


# --- broken programs -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healthy(make_step: Any, two_nodes: Any) -> dict[Rank, Program]:
    programs: dict[Rank, Program] = make_step(two_nodes, (2, 3)).programs
    return programs


def _run(programs: dict[Rank, Program], simulator: Any) -> dict[int, float]:
    lanes = simulator.separate([programs])
    finish: dict[int, float] = simulator(lanes, 1, simulator.random_delays(1)).run()
    return finish


def _find(program: Program, kind: Kind) -> int:
    return next(i for i, op in enumerate(program) if op.kind is kind)


def _with(programs: dict[Rank, Program], rank: Rank, at: int, *ops: Op) -> dict[Rank, Program]:
    program = programs[rank]
    return {**programs, rank: (*program[:at], *ops, *program[at + 1 :])}


def test_swapped_order_is_detected(healthy: dict[Rank, Program], simulator: Any) -> None:
    owner = Rank(1, 0)
    scatter, attend, gather = healthy[owner][:3]
    swapped = {**healthy, owner: (gather, attend, scatter, *healthy[owner][3:])}
    with pytest.raises(simulator.Deadlock, match="scatter of layer 0"):
        _run(swapped, simulator)


@pytest.mark.parametrize("kind", [Kind.SCATTER, Kind.GATHER, Kind.HANDOFF, Kind.FEEDBACK])
def test_dropped_end_is_detected(kind: Kind, healthy: dict[Rank, Program], simulator: Any) -> None:
    for rank, program in healthy.items():
        at = _find(program, kind)
        dropped = _with(healthy, rank, at, replace(program[at], sends=(), recvs=()))
        with pytest.raises((simulator.Deadlock, simulator.Mismatch)):
            _run(dropped, simulator)


@pytest.mark.parametrize(
    "change", [{"start": 1}, {"stop": 9}, {"width": 7}, {"item_bytes": 2}], ids=str
)
@pytest.mark.parametrize("kind", [Kind.SCATTER, Kind.GATHER, Kind.HANDOFF, Kind.FEEDBACK])
def test_wrong_rows_are_detected(
    kind: Kind, change: dict[str, Any], healthy: dict[Rank, Program], simulator: Any
) -> None:
    def wrong(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(t, **change) for t in transfers)

    for rank, program in healthy.items():
        at = _find(program, kind)
        op = program[at]
        broken = replace(op, sends=wrong(op.sends), recvs=wrong(op.recvs))
        assert broken != op
        with pytest.raises(simulator.Mismatch):
            _run(_with(healthy, rank, at, broken), simulator)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (Strategy.HELIX, Kind.EXCHANGE),
        (Strategy.HELIX, Kind.ALL_REDUCE),
        (Strategy.DCP, Kind.QUERY),
        (Strategy.DCP, Kind.LSE_GATHER),
        (Strategy.DCP, Kind.REDUCE_SCATTER),
    ],
)
def test_rank_that_leaves_out_one_exchange_of_all_is_detected(
    strategy: Strategy, kind: Kind, model: Any, group_step: Any, simulator: Any
) -> None:
    """Also where an exchange only posts: its merge, or the end of the run, misses the other end."""
    config = model(2, 2, 2, 1, 2, 4)
    layout = make_layout(config, "float32", 2, [NodeSpec(0)] * 2, strategy=strategy)
    programs = group_step(layout, (Group((0, 1), 0, 3),)).programs
    for rank in layout.ranks():
        broken = _with(programs, rank, _find(programs[rank], kind))
        lanes = simulator.separate([broken])
        with pytest.raises((simulator.Deadlock, simulator.Mismatch)):
            simulator(lanes, 2, simulator.random_delays(3)).run()


def test_missing_rank_is_detected(healthy: dict[Rank, Program], simulator: Any) -> None:
    for rank in healthy:
        with pytest.raises(simulator.Deadlock):
            _run({**healthy, rank: ()}, simulator)


@settings(max_examples=40)
@given(data=st.data(), seed=seeds)
def test_rank_that_disagrees_on_rows_is_detected(
    data: st.DataObject, seed: int, pairs: Any, simulator: Any
) -> None:
    step, other = data.draw(pairs)
    liar = data.draw(st.sampled_from(step.layout.ranks()))
    lie = other.programs[liar]

    def traffic(program: Program) -> list[object]:
        return [
            (op.sends, op.recvs, op.operand_bytes)
            for op in program
            if op.sends or op.recvs or op.operand_bytes
        ]

    assume(traffic(lie) != traffic(step.programs[liar]))
    lanes = simulator.separate([{**step.programs, liar: lie}])
    with pytest.raises((simulator.Deadlock, simulator.Mismatch)):
        simulator(lanes, step.layout.tp, simulator.random_delays(seed)).run()
