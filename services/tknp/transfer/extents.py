"""Runs of memory to copy between two page pools of different head counts. Pure: no torch.

A pool is [layers, 2, pages, heads, page_size, head_dim] (`tknp.kv.storage`), so of one page

    whole page    the heads that both sides have follow each other: one run
    part of it    one run a head
    next page     joins the former run where all heads of both pools are copied and pages follow
                  each other on both sides
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tknp.transfer.plan import Route, pieces


@dataclass(frozen=True)
class PoolShape:
    """Shape of one rank's pool; `item_bytes` of one element."""

    layers: int
    pages: int
    heads: int
    page_size: int
    head_dim: int
    item_bytes: int

    @property
    def slot_bytes(self) -> int:
        """One token of one head of one layer: keys or values."""
        return self.head_dim * self.item_bytes

    @property
    def layer_bytes(self) -> int:
        """Keys and values of one layer."""
        return 2 * self.pages * self.heads * self.page_size * self.slot_bytes

    @property
    def nbytes(self) -> int:
        return self.layers * self.layer_bytes

    def offset(self, layer: int, values: int, page: int, head: int, slot: int) -> int:
        """Bytes from the first of the pool; the caller has checked the ranges."""
        run = ((layer * 2 + values) * self.pages + page) * self.heads + head
        return (run * self.page_size + slot) * self.slot_bytes


class Extent(NamedTuple):
    """Copy `nbytes` from offset `src` of the prefill rank's pool to `dst` of the owner's."""

    src: int
    dst: int
    nbytes: int


def extents(
    route: Route,
    pages: Sequence[int],
    src: PoolShape,
    dst: PoolShape,
    layer: int,
    start: int,
    stop: int,
) -> list[Extent]:
    """Fewest runs that carry tokens [start, stop) of global `layer` along `route`.

    `pages`: the prefill rank's pages of the request, in order.
    """
    found: list[Extent] = []
    sent = pieces(route, layer, start, stop)
    src_layer = layer - route.layers.start + route.src_layer
    dst_layer = layer - route.layers.start + route.dst_layer
    for values in (0, 1):
        for piece in sent:
            slots = piece.last_slot - piece.first_slot
            whole = slots == src.page_size
            heads = len(piece.src_heads)
            nbytes = slots * src.slot_bytes * (heads if whole else 1)
            for head in range(1 if whole else heads):
                a = src.offset(
                    src_layer, values, pages[piece.src_page],
                    piece.src_heads.start + head, piece.first_slot,
                )  # fmt: skip
                b = dst.offset(
                    dst_layer, values, piece.dst_page,
                    piece.dst_heads.start + head, piece.first_slot,
                )  # fmt: skip
                last = found[-1] if found else Extent(-1, -1, 0)
                if (last.src + last.nbytes, last.dst + last.nbytes) == (a, b):
                    found[-1] = Extent(last.src, last.dst, last.nbytes + nbytes)
                else:
                    found.append(Extent(a, b, nbytes))
    return found
