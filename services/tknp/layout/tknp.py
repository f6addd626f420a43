"""Programs of single-copy token parallelism (Decode Token Parallelism, sections 4.1 to 4.4).

For layer l with root r and any other node g, between ranks of equal t:

    (r, t):  Project  Scatter(r -> g)  Attend(own rows)  Gather(g -> r)  Finish
    (g, t):           Scatter(r -> g)  Attend(own rows)  Gather(g -> r)

At the end of a block the residual stream is handed to the next root; the last one hands it to the
sampler where the embeddings are tied. Ids go from the sampler to the first root. A node without
rows takes no part in attention; a step without rows is empty. Nothing depends on context length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from tknp.errors import InvalidValue
from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.model.config import RESIDUAL_BYTES
from tknp.model.shard import Shard

ID_BYTES = 8
LOGIT_BYTES = 4


def derive(layout: Layout, rows: Sequence[int], rank: Rank) -> Program:
    """Program of `rank` for a step in which node g owns `rows[g]` rows.

    Ranks that derive from equal arguments agree on every transfer and its order. Raises
    InvalidValue when a node that is no owner has rows.
    """
    if len(rows) != layout.nodes or any(
        count < 0 or (count and node not in layout.owners) for node, count in enumerate(rows)
    ):
        raise InvalidValue(
            "rows", tuple(rows), f"give one count a node, rows at owners {layout.owners} alone"
        )
    batch = sum(rows)
    return tuple(_operations(layout, rows, rank)) if batch else ()


def _operations(layout: Layout, rows: Sequence[int], rank: Rank) -> Iterator[Op]:
    batch = sum(rows)
    stops = list(accumulate(rows))
    spans = [(stop - n, stop) for stop, n in zip(stops, rows, strict=True)]
    mine = spans[rank.node]
    shard = layout.shard(rank)
    hidden, item = layout.config.hidden_size, layout.item_bytes

    def to_peer(node: int, span: tuple[int, int], width: int, size: int) -> Transfer:
        return Transfer(rank, Rank(node, rank.t), *span, width, size)

    def from_peer(node: int, span: tuple[int, int], width: int, size: int) -> Transfer:
        return Transfer(Rank(node, rank.t), rank, *span, width, size)

    def reduce(layer: int, size: int) -> Iterator[Op]:
        if layout.tp > 1:
            operand = batch * hidden * size
            yield Op(Kind.ALL_REDUCE, 0, batch, layer, operand_bytes=operand)

    if rank.node == layout.first_root:
        yield Op(Kind.EMBED, 0, batch)
        yield from reduce(-1, RESIDUAL_BYTES)
    for layer, root in enumerate(layout.roots):
        others = [g for g in range(layout.nodes) if g != root and rows[g]]
        attend = Op(Kind.ATTEND, *mine, layer)
        if rank.node == root:
            yield Op(Kind.PROJECT, 0, batch, layer)
            if others:
                out = tuple(to_peer(g, spans[g], shard.qkv_width, item) for g in others)
                yield Op(Kind.SCATTER, 0, batch, layer, sends=out)
            if rows[root]:
                yield attend
            if others:
                back = tuple(from_peer(g, spans[g], shard.q_width, item) for g in others)
                yield Op(Kind.GATHER, 0, batch, layer, recvs=back)
            if layout.tp == 1:
                yield Op(Kind.FINISH, 0, batch, layer)
            else:
                yield Op(Kind.OUTPUT, 0, batch, layer)
                yield from reduce(layer, item)
                yield Op(Kind.MLP, 0, batch, layer)
                yield from reduce(layer, item)
        elif rows[rank.node]:
            rows_in = (from_peer(root, mine, shard.qkv_width, item),)
            yield Op(Kind.SCATTER, *mine, layer, recvs=rows_in)
            yield attend
            rows_out = (to_peer(root, mine, shard.q_width, item),)
            yield Op(Kind.GATHER, *mine, layer, sends=rows_out)
        last = layer + 1 == layout.config.layers
        receiver = layout.sampler if last else layout.roots[layer + 1]
        if receiver != root:
            whole = (0, batch)
            if rank.node == root:
                sends = (to_peer(receiver, whole, hidden, RESIDUAL_BYTES),)
                yield Op(Kind.HANDOFF, *whole, layer, sends=sends)
            elif rank.node == receiver:
                recvs = (from_peer(root, whole, hidden, RESIDUAL_BYTES),)
                yield Op(Kind.HANDOFF, *whole, layer, recvs=recvs)
    yield from _sample(layout, batch, rank, shard)


def _sample(layout: Layout, batch: int, rank: Rank, shard: Shard) -> Iterator[Op]:
    drawer = Rank(layout.sampler, 0)
    if rank.node == layout.sampler:
        if rank == drawer:
            peers = (Rank(rank.node, t) for t in range(1, layout.tp))
            logits = tuple(
                Transfer(p, rank, 0, batch, len(layout.shard(p).vocab), LOGIT_BYTES) for p in peers
            )
            yield Op(Kind.SAMPLE, 0, batch, recvs=logits)
        else:
            part = Transfer(rank, drawer, 0, batch, len(shard.vocab), LOGIT_BYTES)
            yield Op(Kind.SAMPLE, 0, batch, sends=(part,))
    readers = [Rank(layout.first_root, t) for t in range(layout.tp)]
    ids = {r: Transfer(drawer, r, 0, batch, 1, ID_BYTES) for r in readers if r != drawer}
    if rank == drawer and ids:
        yield Op(Kind.FEEDBACK, 0, batch, sends=tuple(ids.values()))
    elif rank in ids:
        yield Op(Kind.FEEDBACK, 0, batch, recvs=(ids[rank],))
