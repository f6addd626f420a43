"""Transfers of a layout, and how logits and ids travel at the end of every step."""

from __future__ import annotations

from collections.abc import Iterator

from tknp.layout.layout import Layout
from tknp.layout.program import ID_BYTES, LOGIT_BYTES, LSE_BYTES, Kind, Op, Transfer, What
from tknp.layout.rank import Rank
from tknp.model.config import RESIDUAL_BYTES

_BYTES: dict[What, int] = {
    "lse": LSE_BYTES,
    "x": RESIDUAL_BYTES,
    "logits": LOGIT_BYTES,
    "ids": ID_BYTES,
}


def transfer(
    layout: Layout,
    src: Rank,
    dst: Rank,
    start: int,
    stop: int,
    width: int,
    what: What,
    column: int = 0,
) -> Transfer:
    """Rows [start, stop) of `what`; QKV and attention are in the model's dtype."""
    crosses = layout.domain(src) != layout.domain(dst)
    size = _BYTES.get(what, layout.item_bytes)
    return Transfer(src, dst, start, stop, width, size, what, column, crosses)


def sampling_ranks(layout: Layout, node: int) -> list[Rank]:
    """Ranks that hold a slice of the head, in order of their vocabulary; the first one samples."""
    if layout.spread:
        return list(layout.ranks())
    return [Rank(node, t) for t in range(layout.tp)]


def logits_home(layout: Layout, node: int, batch: int, rank: Rank) -> Op:
    """SAMPLE at `rank`, one of those of `node` that hold the head: logits go to the first."""
    first, *others = sampling_ranks(layout, node)

    def part(peer: Rank) -> Transfer:
        return transfer(layout, peer, first, 0, batch, len(layout.heads(peer).vocab), "logits")

    if rank == first:
        return Op(Kind.SAMPLE, 0, batch, recvs=tuple(part(peer) for peer in others))
    return Op(Kind.SAMPLE, 0, batch, sends=(part(rank),))


def ids_home(layout: Layout, stream: int, batch: int, rank: Rank) -> Iterator[Op]:
    """FEEDBACK: ids from the rank that samples to all that embed."""
    drawer = Rank(layout.sampler(stream), 0)
    ids = {
        reader: transfer(layout, drawer, reader, 0, batch, 1, "ids")
        for reader in layout.ranks()
        if reader != drawer and layout.embeds(stream, reader)
    }
    if rank == drawer and ids:
        yield Op(Kind.FEEDBACK, 0, batch, sends=tuple(ids.values()))
    elif rank in ids:
        yield Op(Kind.FEEDBACK, 0, batch, recvs=(ids[rank],))
