"""Attention of Helix (sections 2.1 and 2.2): one all-to-all under the next rows' attention.

    overlap 1:  Attend(all)  Exchange(all)  Merge(all)
    overlap 2:  Attend(0)  Exchange(0)  Attend(1)  Exchange(1)  Merge(0)  Merge(1)

An exchange sends each rank of equal t its columns of the partial output, with the LSE of the heads
that these columns belong to. It only posts; the merge of the same rows waits for it (HOP-B).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Transfer
from tknp.layout.rank import Rank
from tknp.layout.spread import peers
from tknp.layout.wire import transfer


def attention(layout: Layout, batch: int, rank: Rank) -> Iterator[Op]:
    """From QKV rows of this rank's heads to its columns of the merged output."""
    if layout.nodes == 1:
        yield Op(Kind.ATTEND, 0, batch)
        return
    parts = min(layout.overlap, batch)
    spans = list(pairwise(batch * i // parts for i in range(parts + 1)))
    for start, stop in spans:
        yield Op(Kind.ATTEND, start, stop, partial=True)
        sends, recvs = [], []
        for peer in peers(layout, rank):
            sends += _columns(layout, rank, peer, start, stop)
            recvs += _columns(layout, peer, rank, start, stop)
        yield Op(Kind.EXCHANGE, start, stop, sends=tuple(sends), recvs=tuple(recvs))
    for start, stop in spans:
        yield Op(Kind.MERGE, start, stop, owners=layout.owners[0])


def _columns(layout: Layout, src: Rank, dst: Rank, start: int, stop: int) -> list[Transfer]:
    """What `dst` needs of the partial outputs of `src`."""
    columns, size = layout.heads(dst).output_columns, layout.config.head_dim
    first, last = columns.start // size, (columns.stop - 1) // size
    return [
        transfer(layout, src, dst, start, stop, len(columns), "attention", columns.start),
        transfer(layout, src, dst, start, stop, last + 1 - first, "lse", first),
    ]
