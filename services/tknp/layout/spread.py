"""Programs of strategies that run dense work on all ranks and divide every sequence: dcp, helix.

With N nodes (sequence shards) of T ranks, at every rank and for every layer:

    Project  <attention of the strategy>  Output  AllReduce(pool)  Mlp  AllReduce(pool)

where the attention leaves each rank with its columns of the merged output: rank (n, t) keeps slice
n of N of the columns of the query heads of t. The vocabulary is divided over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op
from tknp.layout.rank import Rank
from tknp.layout.wire import ids_home, logits_home
from tknp.model.config import RESIDUAL_BYTES

Attention = Callable[[Layout, int, int, Rank], Iterator[Op]]  # layout, rows, layer, rank


def operations(layout: Layout, batch: int, rank: Rank, attention: Attention) -> Iterator[Op]:
    """Operations of `rank` for a step of `batch` rows, at least one."""
    yield Op(Kind.EMBED, 0, batch)
    yield from _reduce(layout, batch, -1, RESIDUAL_BYTES)
    for layer in range(layout.config.layers):
        yield Op(Kind.PROJECT, 0, batch, layer)
        yield from attention(layout, batch, layer, rank)
        if layout.dense_tp == 1:
            yield Op(Kind.FINISH, 0, batch, layer)
            continue
        yield Op(Kind.OUTPUT, 0, batch, layer)
        yield from _reduce(layout, batch, layer, layout.item_bytes)
        yield Op(Kind.MLP, 0, batch, layer)
        yield from _reduce(layout, batch, layer, layout.item_bytes)
    yield logits_home(layout, 0, batch, rank)
    yield from ids_home(layout, 0, batch, rank)


def peers(layout: Layout, rank: Rank) -> list[Rank]:
    """Ranks of equal t on the other nodes, in order."""
    return [Rank(n, rank.t) for n in range(layout.nodes) if n != rank.node]


def _reduce(layout: Layout, batch: int, layer: int, size: int) -> Iterator[Op]:
    if layout.dense_tp > 1:
        operand = batch * layout.config.hidden_size * size
        yield Op(Kind.ALL_REDUCE, 0, batch, layer, operand_bytes=operand, scope="pool")
