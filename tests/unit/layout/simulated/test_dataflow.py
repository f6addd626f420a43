"""What programs compute, by running them on symbols instead of tensors.

Each rank's buffers hold, for each row, the layer whose value stands there: the residual stream the
number of layers behind it, QKV and attention output their layer, partial outputs their owner
too. Every operation checks that its inputs stand where it runs and are of its layer, so that a
missing, late or misrouted row, slice or part shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import ID_BYTES, LOGIT_BYTES, LSE_BYTES, Kind, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy
from tknp.model.config import RESIDUAL_BYTES


class _Symbols:
    """Interpreter of one stream's programs; an observer of the simulator."""

    def __init__(self, step: Any) -> None:
        self.step = step
        ranks = step.layout.ranks()
        self.residual: dict[Rank, dict[int, int]] = {rank: {} for rank in ranks}
        self.qkv: dict[Rank, dict[int, int]] = {rank: {} for rank in ranks}
        self.whole: dict[Rank, set[int]] = {rank: set() for rank in ranks}  # rows with k and v
        self.slices: dict[Rank, set[tuple[int, int, int]]] = {rank: set() for rank in ranks}
        self.out: dict[Rank, dict[int, int]] = {rank: {} for rank in ranks}
        # What lies at a rank of row's partial outputs: (layer, row, owner, "attention" or "lse").
        self.parts: dict[Rank, set[tuple[int, int, int, str]]] = {rank: set() for rank in ranks}
        self.logits: dict[Rank, set[tuple[Rank, int]]] = {rank: set() for rank in ranks}
        self.ids: dict[Rank, set[int]] = {rank: set() for rank in ranks}
        self.partial: dict[Rank, bool] = dict.fromkeys(ranks, False)
        self.attended: Counter[tuple[int, int, Rank]] = Counter()  # (layer, row, rank)

    def moved(self, task: Any, transfer: Transfer) -> None:
        kind, layer, src, dst = task.op.kind, task.op.layer, transfer.src, transfer.dst
        rows = range(transfer.start, transfer.stop)
        assert rows, "a transfer of no rows"
        match kind:
            case Kind.SCATTER:
                self._copy(self.qkv, transfer, layer)
                if transfer.what == "qkv":
                    assert set(rows) <= self.whole[src]
                    self.whole[dst] |= set(rows)
                else:
                    self.whole[dst] -= set(rows)
            case Kind.QUERY:
                assert self.qkv[src].items() >= dict.fromkeys(rows, layer).items()
                self.slices[dst] |= {(layer, row, src.node) for row in rows}
            case Kind.GATHER | Kind.EXCHANGE | Kind.LSE_GATHER | Kind.REDUCE_SCATTER:
                wide = [row for row in rows if len(self._owners(row)) > 1]
                found = {(layer, row, src.node, transfer.what) for row in wide}
                assert found <= self.parts[src]
                self.parts[dst] |= found
                if not wide:
                    self._copy(self.out, transfer, layer)
                if kind in (Kind.EXCHANGE, Kind.REDUCE_SCATTER) and transfer.what == "attention":
                    columns = range(transfer.column, transfer.column + transfer.width)
                    assert columns == self.step.layout.heads(dst).output_columns
                if kind is Kind.REDUCE_SCATTER:
                    self._all_parts(src, layer, rows, {"lse"})
            case Kind.HANDOFF:
                self._whole(src, layer + 1)
                self._copy(self.residual, transfer, layer + 1)
            case Kind.SAMPLE:
                self._whole(src, self.step.layout.config.layers)
                self.logits[dst] |= {(src, row) for row in rows}
            case Kind.FEEDBACK:
                self.ids[dst] |= self.ids[src] & set(rows)
            case _:
                pytest.fail(f"{kind} moves rows")

    def _owners(self, row: int) -> tuple[int, ...]:
        """Nodes that divide the sequence of `row`."""
        owners: tuple[int, ...] = self.step.group_of[row].owners
        return owners if self.step.layout.divides == "tokens" else owners[:1]

    def _copy(self, buffers: dict[Rank, dict[int, int]], transfer: Transfer, value: int) -> None:
        for row in range(transfer.start, transfer.stop):
            assert buffers[transfer.src][row] == value
            buffers[transfer.dst][row] = value

    def _whole(self, rank: Rank, value: int) -> None:
        assert self.residual[rank] == dict.fromkeys(range(self.step.batch), value)
        assert not self.partial[rank], "a partial sum is used"

    def _all_parts(self, rank: Rank, layer: int, rows: range, whats: set[str]) -> None:
        for row in rows:
            expected = {(layer, row, owner, w) for owner in self._owners(row) for w in whats}
            assert expected <= self.parts[rank], "a part is missing"

    def done(self, rank: Rank, task: Any) -> None:
        op, layer, layout = task.op, task.op.layer, self.step.layout
        rows = range(op.start, op.stop)
        batch = dict.fromkeys(range(self.step.batch), layer)
        match op.kind:
            case Kind.EMBED:
                self.residual[rank] = dict.fromkeys(rows, 0)
                self.partial[rank] = layout.dense_tp > 1
            case Kind.PROJECT:
                self._whole(rank, layer)
                self.qkv[rank] = dict.fromkeys(rows, layer)
                self.whole[rank] = set(rows)
                self.slices[rank] |= {(layer, row, rank.node) for row in rows}
            case Kind.ATTEND:
                for row in rows:
                    self._attend(rank, layer, row, partial=op.partial)
            case Kind.MERGE:
                assert all(self._owners(row) == op.owners for row in rows)
                self._all_parts(rank, layer, rows, {"attention", "lse"})
                self.out[rank] |= dict.fromkeys(rows, layer)
            case Kind.REDUCE_SCATTER:
                self._all_parts(rank, layer, rows, {"attention"})
                self.out[rank] |= dict.fromkeys(rows, layer)
            case Kind.FINISH:
                assert layout.dense_tp == 1
                assert self.out[rank] == batch
                self.residual[rank] = dict.fromkeys(rows, layer + 1)
            case Kind.OUTPUT:
                assert self.out[rank] == batch
                self._whole(rank, layer)
                self.partial[rank] = True
            case Kind.MLP:
                self._whole(rank, layer)
                self.residual[rank] = dict.fromkeys(rows, layer + 1)
                self.partial[rank] = True
            case Kind.ALL_REDUCE:
                assert self.partial[rank]
                self.partial[rank] = False
            case Kind.SAMPLE:
                self._whole(rank, layout.config.layers)
                if not op.sends:
                    others = {r for r, _ in self.step.kinds(Kind.SAMPLE)} - {rank}
                    assert self.logits[rank] == {(r, row) for r in others for row in rows}
                    self.ids[rank] = set(rows)

    def _attend(self, rank: Rank, layer: int, row: int, *, partial: bool) -> None:
        layout, owners = self.step.layout, self._owners(row)
        assert self.qkv[rank][row] == layer
        assert partial is (len(owners) > 1)
        if layout.spread or rank.node == self.step.group_of[row].appender:
            assert row in self.whole[rank], "k and v are missing"
        if layout.strategy is Strategy.DCP:
            assert self.slices[rank] >= {(layer, row, node) for node in owners}
        self.attended[layer, row, rank] += 1
        if partial:
            self.parts[rank] |= {(layer, row, rank.node, w) for w in ("attention", "lse")}
        else:
            self.out[rank][row] = layer


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_every_row_passes_every_layer_and_its_id_returns(
    data: st.DataObject, seed: int, any_steps: Any, simulator: Any
) -> None:
    step = data.draw(any_steps)
    layout, symbols = step.layout, _Symbols(step)
    lanes = simulator.separate([step.programs])
    simulator(lanes, layout.tp, simulator.random_delays(seed), symbols).run()

    def keepers(layer: int, row: int) -> tuple[int, ...]:
        pipelined = layout.divides == "layers"
        return (layout.roots(step.stream)[layer],) if pipelined else step.group_of[row].owners

    assert symbols.attended == {
        (layer, row, Rank(node, t)): 1
        for layer in range(layout.config.layers)
        for row in range(step.batch)
        for node in keepers(layer, row)
        for t in range(layout.tp)
    }
    for rank in layout.ranks():
        expected = set(range(step.batch)) if layout.embeds(step.stream, rank) else set()
        assert symbols.ids[rank] >= expected


@settings(max_examples=25)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_streams_compute_the_same_whatever_runs_beside_them(
    data: st.DataObject, seed: int, streams: Any, simulator: Any
) -> None:
    """Every stream of every layout that has several, on lanes of their own and on one."""
    drawn = data.draw(streams)
    programs = [step.programs for step in drawn]
    tp, delays = drawn[0].layout.tp, simulator.random_delays(seed)
    for lanes in (simulator.separate(programs), simulator.merged(programs, range(len(drawn)))):
        beside = [_Symbols(step) for step in drawn]
        simulator(lanes, tp, delays, _Several(beside)).run()
        for step, symbols in zip(drawn, beside, strict=True):
            alone = _Symbols(step)
            simulator(simulator.separate([step.programs]), tp, delays, alone).run()
            assert symbols.attended == alone.attended
            assert symbols.ids == alone.ids


class _Several:
    """One interpreter a stream."""

    def __init__(self, symbols: list[_Symbols]) -> None:
        self.symbols = symbols

    def moved(self, task: Any, transfer: Transfer) -> None:
        self.symbols[task.stream].moved(task, transfer)

    def done(self, rank: Rank, task: Any) -> None:
        self.symbols[task.stream].done(rank, task)


def _without(step: Any, kind: Kind) -> dict[Rank, Program]:
    """Programs that miss their last operation of `kind`."""
    cut_short = {}
    for rank, program in step.programs.items():
        found = [i for i, op in enumerate(program) if op.kind is kind][-1:]
        cut_short[rank] = tuple(op for i, op in enumerate(program) if i not in found)
    return cut_short


@pytest.mark.parametrize("kind", [Kind.PROJECT, Kind.ATTEND, Kind.FINISH, Kind.EMBED])
def test_missing_computation_is_detected(
    kind: Kind, make_step: Any, simulator: Any, two_nodes: Any
) -> None:
    step = make_step(two_nodes, (2, 3))
    lanes = simulator.separate([_without(step, kind)])
    run = simulator(lanes, 1, simulator.random_delays(0), _Symbols(step))
    with pytest.raises((AssertionError, KeyError)):
        run.run()


@pytest.mark.parametrize("kind", [Kind.MERGE, Kind.ATTEND])
def test_missing_part_or_merge_is_detected(
    kind: Kind, group_step: Any, simulator: Any, two_nodes: Any
) -> None:
    step = group_step(two_nodes, (Group((0,), 0, 1), Group((1, 0), 1, 2)))
    lanes = simulator.separate([_without(step, kind)])
    with pytest.raises((AssertionError, KeyError)):
        simulator(lanes, 1, simulator.random_delays(0), _Symbols(step)).run()


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (Strategy.HELIX, Kind.EXCHANGE),
        (Strategy.HELIX, Kind.MERGE),
        (Strategy.DCP, Kind.QUERY),
        (Strategy.DCP, Kind.LSE_GATHER),
        (Strategy.DCP, Kind.REDUCE_SCATTER),
    ],
)
def test_missing_step_of_a_sequence_exchange_is_detected(
    strategy: Strategy, kind: Kind, model: Any, group_step: Any, simulator: Any
) -> None:
    config = model(2, 2, 2, 1, 2, 4)
    layout = make_layout(config, "float32", 2, [NodeSpec(0)] * 2, strategy=strategy)
    step = group_step(layout, (Group((0, 1), 0, 3),))
    lanes = simulator.separate([_without(step, kind)])
    with pytest.raises((AssertionError, KeyError)):
        simulator(lanes, 2, simulator.random_delays(0), _Symbols(step)).run()


def test_wire_types() -> None:
    """Ids travel as int64; logits, LSE and residual stream as float32, whatever the dtype."""
    assert (ID_BYTES, LOGIT_BYTES, LSE_BYTES, RESIDUAL_BYTES) == (8, 4, 4, 4)
