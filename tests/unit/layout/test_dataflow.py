"""What programs compute, by running them on symbols instead of tensors.

Each rank's buffers hold, for each row, the layer whose value stands there: the residual stream the
number of layers behind it, QKV and attention output their layer. Every operation checks that its
inputs stand where it runs and are of its layer, so that a missing, late or misrouted row shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.layout.program import ID_BYTES, LOGIT_BYTES, Kind, Transfer
from tknp.layout.rank import Rank
from tknp.model.config import RESIDUAL_BYTES


class _Symbols:
    """Interpreter of one stream's programs; an observer of the simulator."""

    def __init__(self, step: Any) -> None:
        self.step = step
        ranks = step.layout.ranks()
        self.residual: dict[Rank, dict[int, int]] = {rank: {} for rank in ranks}
        self.qkv: dict[Rank, dict[int, int]] = {rank: {} for rank in ranks}
        self.out: dict[Rank, dict[int, int]] = {rank: {} for rank in ranks}
        self.logits: dict[Rank, set[tuple[int, int]]] = {rank: set() for rank in ranks}
        self.ids: dict[Rank, set[int]] = {rank: set() for rank in ranks}
        self.partial: dict[Rank, bool] = dict.fromkeys(ranks, False)
        self.attended: Counter[tuple[int, int, int]] = Counter()  # (layer, row, t)

    def moved(self, task: Any, transfer: Transfer) -> None:
        kind, layer = task.op.kind, task.op.layer
        rows = range(transfer.start, transfer.stop)
        assert rows, "a transfer of no rows"
        match kind:
            case Kind.SCATTER:
                self._copy(self.qkv, transfer, layer)
            case Kind.GATHER:
                self._copy(self.out, transfer, layer)
            case Kind.HANDOFF:
                self._whole(transfer.src, layer + 1)
                self._copy(self.residual, transfer, layer + 1)
            case Kind.SAMPLE:
                self._whole(transfer.src, self.step.layout.config.layers)
                self.logits[transfer.dst] |= {(transfer.src.t, row) for row in rows}
            case Kind.FEEDBACK:
                self.ids[transfer.dst] |= self.ids[transfer.src] & set(rows)
            case _:
                pytest.fail(f"{kind} moves rows")

    def _copy(self, buffers: dict[Rank, dict[int, int]], transfer: Transfer, value: int) -> None:
        for row in range(transfer.start, transfer.stop):
            assert buffers[transfer.src][row] == value
            buffers[transfer.dst][row] = value

    def _whole(self, rank: Rank, value: int) -> None:
        assert self.residual[rank] == dict.fromkeys(range(self.step.batch), value)
        assert not self.partial[rank], "a partial sum is used"

    def done(self, rank: Rank, task: Any) -> None:
        op, layer, tp = task.op, task.op.layer, self.step.layout.tp
        rows = range(op.start, op.stop)
        batch = dict.fromkeys(range(self.step.batch), layer)
        match op.kind:
            case Kind.EMBED:
                self.residual[rank] = dict.fromkeys(rows, 0)
                self.partial[rank] = tp > 1
            case Kind.PROJECT:
                self._whole(rank, layer)
                self.qkv[rank] = dict.fromkeys(rows, layer)
            case Kind.ATTEND:
                for row in rows:
                    assert self.qkv[rank][row] == layer
                    self.out[rank][row] = layer
                    self.attended[layer, row, rank.t] += 1
            case Kind.FINISH:
                assert tp == 1
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
                self._whole(rank, self.step.layout.config.layers)
                if rank.t == 0:
                    parts = {(t, row) for t in range(1, tp) for row in rows}
                    assert self.logits[rank] == parts
                    self.ids[rank] = set(rows)


@settings(max_examples=70)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_every_row_passes_every_layer_and_its_id_returns(
    data: st.DataObject, seed: int, steps: Any, simulator: Any
) -> None:
    step = data.draw(steps)
    layout, symbols = step.layout, _Symbols(step)
    lanes = simulator.separate([step.programs])
    simulator(lanes, layout.tp, simulator.random_delays(seed), symbols).run()
    everything = {
        (layer, row, t): 1
        for layer in range(layout.config.layers)
        for row in range(step.batch)
        for t in range(layout.tp)
    }
    assert symbols.attended == everything
    for t in range(layout.tp):
        assert symbols.ids[Rank(layout.first_root(0), t)] == set(range(step.batch))


@pytest.mark.parametrize("kind", [Kind.PROJECT, Kind.ATTEND, Kind.FINISH, Kind.EMBED])
def test_missing_computation_is_detected(
    kind: Kind, make_step: Any, simulator: Any, two_nodes: Any
) -> None:
    step = make_step(two_nodes, (2, 3))
    cut_short = {}
    for rank, program in step.programs.items():
        found = [i for i, op in enumerate(program) if op.kind is kind][-1:]
        cut_short[rank] = tuple(op for i, op in enumerate(program) if i not in found)
    run = simulator(simulator.separate([cut_short]), 1, simulator.random_delays(0), _Symbols(step))
    with pytest.raises((AssertionError, KeyError)):
        run.run()


def test_wire_types() -> None:
    """Ids travel as int64, logits and the residual stream as float32, whatever the dtype."""
    assert (ID_BYTES, LOGIT_BYTES, RESIDUAL_BYTES) == (8, 4, 4)
