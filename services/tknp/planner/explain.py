"""Everything about one step of one strategy: who holds what, who does what, what moves, how long.

model, strategy, pool, load --explain--> Explanation --as_dict--> JSON
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tknp.errors import InvalidValue
from tknp.layout.derive import derive
from tknp.layout.layout import Layout, lay_out
from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.layout.strategies import Grid, grid
from tknp.layout.strategy import Strategy
from tknp.planner.capacity import Capacity, capacity
from tknp.planner.folding import Segment, fold
from tknp.planner.forecast import Forecast, forecast
from tknp.planner.hardware import Hardware
from tknp.planner.models import Model
from tknp.planner.step import Step, make_step
from tknp.planner.traffic import Payload, RankTraffic, payload, traffic


@dataclass(frozen=True)
class Load:
    """`batch` requests of `context` tokens. `width`: owners of each; None: as few as hold it."""

    batch: int
    context: int
    width: int | None = None


@dataclass(frozen=True)
class Explanation:
    """`machines` of `machine_ranks`; `layout` has the strategy's logical nodes.

    `unfitted`: capacity with one memory budget for replicas and pools. `dp`, `dp_unfitted`: of as
    many replicas, None where one doesn't fit a machine.
    """

    model: Model
    hardware: Hardware
    machines: int
    machine_ranks: int
    load: Load
    step: Step
    capacity: Capacity
    unfitted: Capacity | None
    dp: Capacity | None

    @property
    def layout(self) -> Layout:
        return self.step.layout

    @cached_property
    def payload(self) -> Payload:
        return payload(self.step)

    @cached_property
    def traffic(self) -> dict[Rank, RankTraffic]:
        return traffic(self.step)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return fold(self.step)

    @cached_property
    def forecast(self) -> Forecast:
        return forecast(self.model, self.hardware, self.step)

    @property
    def resident(self) -> int:
        """Requests of this context that the pool holds at once."""
        if self.layout.divides == "tokens" and not self.layout.spread and self.step.width == 1:
            return sum(node.tokens // self.load.context for node in self.capacity.nodes)
        return self.capacity.tokens // self.load.context

    @cached_property
    def dcp(self) -> tuple[int, int] | None:
        """Bytes of partial outputs and statistics on a rank of DCP over the same machines.

        Equation (4). None where that model can't be laid out so.
        """
        model = self.model
        try:
            chosen = grid(
                model.config, Strategy.DCP, nodes=self.machines, tp=self.machine_ranks
            )  # fmt: skip
        except InvalidValue:
            return None
        layout = lay_out(model.config, model.dtype, chosen, chosen.specs(0))
        if layout.nodes == 1:
            return None
        rank = Rank(0, 0)
        program = derive(layout, 0, make_step(layout, self.load.batch, 1).groups[0], rank)
        attend = next(op for op in program if op.kind is Kind.ATTEND)
        gather = next(op for op in program if op.kind is Kind.LSE_GATHER)
        output = attend.rows * layout.heads(rank).q_width * layout.item_bytes
        return output, gather.sends[0].nbytes

    def ratio_to_dp(self, *, fitted: bool = True, tokens: bool = False) -> float | None:
        """Usable KV over that of data parallelism: bytes, or tokens where whole layers limit."""
        mine = self.capacity if fitted else self.unfitted
        if self.dp is None or mine is None:
            return None
        if tokens:
            return mine.tokens / self.dp.tokens if self.dp.tokens else None
        return mine.kv_bytes / self.dp.kv_bytes if self.dp.kv_bytes else None


def explain(
    model: Model,
    hardware: Hardware,
    strategy: Strategy,
    *,
    nodes: int,
    tp: int,
    load: Load,
    kvp: int | None = None,
    copies: int | None = None,
    microbatches: int | None = None,
    overlap: int | None = None,
    inside: bool | None = None,
    roles: Sequence[str] = (),
) -> Explanation:
    """`model` on `nodes` machines of `tp` ranks. Raises InvalidValue for what can't be."""
    chosen = grid(
        model.config, strategy, nodes=nodes, tp=tp, kvp=kvp, copies=copies,
        microbatches=microbatches, width=load.width, overlap=overlap, inside=inside, roles=roles,
    )  # fmt: skip
    layout = _lay_out(model, hardware, chosen)
    room = capacity(model, layout, hardware)
    return Explanation(
        model, hardware, nodes, tp, load,
        make_step(layout, load.batch, load.context, load.width or _width(layout, room, load)),
        room,
        _try(model, layout, hardware, fitted=False),
        _replicas(model, hardware, nodes, tp),
    )  # fmt: skip


def _lay_out(model: Model, hardware: Hardware, chosen: Grid) -> Layout:
    return lay_out(model.config, model.dtype, chosen, chosen.specs(hardware.pool_bytes))


def _width(layout: Layout, room: Capacity, load: Load) -> int:
    """Owners that a request needs: one, unless no node can hold it."""
    most = max(node.tokens for node in room.nodes)
    if layout.width == 1 or most == 0:
        return 1
    return min(-(-load.context // most), layout.width)


def _try(
    model: Model, layout: Layout, hardware: Hardware, *, fitted: bool
) -> Capacity | None:  # fmt: skip
    try:
        return capacity(model, layout, hardware, fitted=fitted)
    except InvalidValue:
        return None


def _replicas(model: Model, hardware: Hardware, nodes: int, tp: int) -> Capacity | None:
    try:
        chosen = grid(model.config, Strategy.DP, nodes=nodes, tp=tp)
    except InvalidValue:
        return None
    return _try(model, _lay_out(model, hardware, chosen), hardware, fitted=True)


def with_memory(hardware: Hardware, memory_bytes: int) -> Hardware:
    """`hardware` whose ranks have `memory_bytes` for weights and KV, alone or in a pool."""
    return replace(hardware, replica_bytes=memory_bytes, pool_bytes=memory_bytes)
