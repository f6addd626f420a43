"""Programs of strategies that run dense work on all ranks and divide every sequence: dcp, helix.

With N nodes (sequence shards) of T ranks, at every rank and for every layer:

    Project  <attention of the strategy>  Output  AllReduce(pool)  Mlp  AllReduce(pool)

where the attention leaves each rank with its columns of the merged output: rank (n, t) keeps slice
n of N of the columns of the query heads of t. The vocabulary is divided over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op
from tknp.layout.rank import Rank
from tknp.layout.wire import ids_home, logits_home
from tknp.model.config import RESIDUAL_BYTES

Attention = Callable[[Layout, int, Rank], Iterator[Op]]  # layout, rows, rank; any layer


def operations(layout: Layout, batch: int, rank: Rank, attention: Attention) -> Iterator[Op]:
    """Operations of `rank` for a step of `batch` rows, at least one."""
    yield Op(Kind.EMBED, 0, batch)
    yield from _reduce(layout, batch, RESIDUAL_BYTES)
    one_layer = tuple(_layer(layout, batch, rank, attention))
    for layer in range(layout.config.layers):
        for op in one_layer:
            yield replace(op, layer=layer)
    yield logits_home(layout, 0, batch, rank)
    yield from ids_home(layout, 0, batch, rank)


def peers(layout: Layout, rank: Rank) -> list[Rank]:
    """Ranks of equal t on the other nodes, in order."""
    return [Rank(n, rank.t) for n in range(layout.nodes) if n != rank.node]


def _layer(layout: Layout, batch: int, rank: Rank, attention: Attention) -> Iterator[Op]:
    yield Op(Kind.PROJECT, 0, batch)
    yield from attention(layout, batch, rank)
    if layout.dense_tp == 1:
        yield Op(Kind.FINISH, 0, batch)
        return
    yield Op(Kind.OUTPUT, 0, batch)
    yield from _reduce(layout, batch, layout.item_bytes)
    yield Op(Kind.MLP, 0, batch)
    yield from _reduce(layout, batch, layout.item_bytes)


def _reduce(layout: Layout, batch: int, size: int) -> Iterator[Op]:
    if layout.dense_tp > 1:
        operand = batch * layout.config.hidden_size * size
        yield Op(Kind.ALL_REDUCE, 0, batch, operand_bytes=operand, scope="pool")
