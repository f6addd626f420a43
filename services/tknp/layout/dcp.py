"""Attention of decode context parallelism, as vLLM has it (Decode Token Parallelism, section 4.4).

Query    column slices of q, k and v, among ranks of equal t: each gets its heads' whole rows
Attend   over this node's part of every sequence
LseGather      LSE of all heads; each scales its output by its share of the softmax
ReduceScatter  each sums its own columns of the scaled outputs, in node order
"""

from __future__ import annotations

from collections.abc import Iterator

from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Transfer
from tknp.layout.rank import Rank
from tknp.layout.spread import peers
from tknp.layout.wire import transfer


def attention(layout: Layout, batch: int, rank: Rank) -> Iterator[Op]:
    """From this rank's columns of QKV to its columns of the merged output."""
    others = peers(layout, rank)
    if not others:
        yield Op(Kind.ATTEND, 0, batch)
        return

    def exchange(kind: Kind) -> Op:
        return Op(
            kind, 0, batch,
            sends=tuple(_moved(layout, batch, kind, rank, peer) for peer in others),
            recvs=tuple(_moved(layout, batch, kind, peer, rank) for peer in others),
        )  # fmt: skip

    yield exchange(Kind.QUERY)
    yield Op(Kind.ATTEND, 0, batch, partial=True)
    yield exchange(Kind.LSE_GATHER)
    yield exchange(Kind.REDUCE_SCATTER)


def _moved(layout: Layout, batch: int, kind: Kind, src: Rank, dst: Rank) -> Transfer:
    heads = layout.heads(src)
    if kind is Kind.QUERY:
        return transfer(layout, src, dst, 0, batch, heads.projected_width, "qkv")
    if kind is Kind.LSE_GATHER:
        return transfer(layout, src, dst, 0, batch, len(heads.q_heads), "lse")
    columns = layout.heads(dst).output_columns
    return transfer(layout, src, dst, 0, batch, len(columns), "attention", columns.start)
