"""Bytes that a step moves, from its programs: what the paper's equations (1) to (5) speak of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.planner.step import EXCHANGES, Step


@dataclass(frozen=True)
class RankTraffic:
    """Bytes that one rank sends in a step of every stream.

    `reduced_bytes`, `pool_reduced_bytes`: operands of its all-reduces in the node, and over the
    pool; what an all-reduce puts on links depends on its algorithm.
    """

    network_bytes: int = 0
    link_bytes: int = 0
    reduced_bytes: int = 0
    pool_reduced_bytes: int = 0


@dataclass(frozen=True)
class Payload:
    """Sizes of one layer's exchange; None where the strategy has no such transfer.

    `scatter_bytes`, `gather_bytes`: from and to the root, one owner and rank, equation (2).
    `layer_bytes`: between nodes, all ranks of one t, equation (3). `operand_bytes`: of an
    all-reduce. `output_bytes`, `lse_bytes`: partial outputs and statistics that one rank hands out
    where sequences are sharded, equation (4).
    """

    scatter_bytes: int | None
    gather_bytes: int | None
    layer_bytes: int
    operand_bytes: int | None
    output_bytes: int | None
    lse_bytes: int | None


def traffic(step: Step) -> dict[Rank, RankTraffic]:
    """By rank, of ranks 0 and 1 of each node."""
    network, link = Counter[Rank](), Counter[Rank]()
    reduced, pool_reduced = Counter[Rank](), Counter[Rank]()
    for programs in step.programs:
        for rank, program in programs.items():
            for op in program:
                for transfer in op.sends:
                    to = network if transfer.crosses_nodes else link
                    to[rank] += transfer.nbytes
                (pool_reduced if op.scope == "pool" else reduced)[rank] += op.operand_bytes
    return {
        rank: RankTraffic(network[rank], link[rank], reduced[rank], pool_reduced[rank])
        for rank in step.layout.ranks()
        if rank.t < 2
    }


def payload(step: Step) -> Payload:
    """Of the layer and stream that move most."""
    layers: Counter[tuple[int, int, int]] = Counter()
    for stream, op, transfer in step.transfers(*EXCHANGES):
        if transfer.src.node != transfer.dst.node:
            layers[stream, op.layer, transfer.src.t] += transfer.nbytes
    operands = [op.operand_bytes for _, _, op in step.operations(Kind.ALL_REDUCE) if op.layer >= 0]
    return Payload(
        scatter_bytes=_largest(_sizes(step, Kind.SCATTER)),
        gather_bytes=_largest(_sizes(step, Kind.GATHER)),
        layer_bytes=max(layers.values(), default=0),
        operand_bytes=_largest(operands),
        output_bytes=_partial_bytes(step),
        lse_bytes=_statistic_bytes(step),
    )


def _sizes(step: Step, kind: Kind) -> Iterable[int]:
    return (t.nbytes for _, _, t in step.transfers(kind) if t.src.node != t.dst.node)


def _largest(sizes: Iterable[int]) -> int | None:
    return max(sizes, default=None)


def _partial_bytes(step: Step) -> int | None:
    """What Attend leaves at one rank that a merge takes apart."""
    layout = step.layout
    if not layout.spread:
        return None
    rows = max((op.rows for _, _, op in step.operations(Kind.ATTEND)), default=0)
    return rows * layout.heads(Rank(0, 0)).q_width * layout.item_bytes


def _statistic_bytes(step: Step) -> int | None:
    layout = step.layout
    if not layout.spread:
        return None
    rows = max((op.rows for _, _, op in step.operations(Kind.ATTEND)), default=0)
    return rows * len(layout.heads(Rank(0, 0)).q_heads) * 4
