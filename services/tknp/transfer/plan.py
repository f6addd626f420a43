"""Which bytes of a prompt's KV go from one prefill rank to which owner rank. Pure: no torch.

    Shard (T' ranks)          Placement (T ranks, token ranges)
    kv heads of this rank  x  layers, heads, tokens, pages of an owner rank  ->  Route
    Route  x  (layer, tokens [start, stop))                                  ->  Piece, one a page

T' and T may differ, and either may exceed Hkv, where several ranks hold one head: of the prefill
ranks that hold a head only the lowest sends it; every owner rank that keeps it receives it. So over
all prefill ranks each (layer, token, head) reaches each owner rank that keeps it exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from tknp.errors import InvalidValue, ProtocolError
from tknp.model.shard import Shard


class PlacementLike(Protocol):
    """What is read of `tknp.v1.common.Placement`."""

    @property
    def node(self) -> int: ...
    @property
    def tp_rank(self) -> int: ...
    @property
    def layer_start(self) -> int: ...
    @property
    def layer_stop(self) -> int: ...
    @property
    def head_start(self) -> int: ...
    @property
    def head_stop(self) -> int: ...
    @property
    def token_start(self) -> int: ...
    @property
    def token_stop(self) -> int: ...
    @property
    def pages(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Route:
    """Everything that one prefill rank sends to one owner rank.

    `index`: of the placement in the request, and of the owner's address.
    `layers`, `heads`, `tokens`: what is sent, in global numbers.
    `src_layer`, `src_head`: index of the first of them in this prefill rank's storage;
    `dst_layer`, `dst_head`: in the owner rank's storage, whose first layer and head are those of
    the placement. `pages`: the owner's page of tokens [tokens.start + i page_size, ...).
    """

    index: int
    node: int
    tp_rank: int
    layers: range
    heads: range
    tokens: range
    src_layer: int
    dst_layer: int
    src_head: int
    dst_head: int
    pages: tuple[int, ...]
    page_size: int

    def __str__(self) -> str:
        return f"owner rank ({self.node}, {self.tp_rank})"


@dataclass(frozen=True, slots=True)
class Piece:
    """Slots [first_slot, last_slot) of one page of one layer: equal on both sides.

    `src_page`: index into the prefill rank's page list of the request. `dst_page`: page id in the
    owner's pool. `src_heads`, `dst_heads`: indices in the storage of either side, equally many.
    """

    src_page: int
    dst_page: int
    src_heads: range
    dst_heads: range
    first_slot: int
    last_slot: int


def routes(shard: Shard, placements: Sequence[PlacementLike], page_size: int) -> tuple[Route, ...]:
    """One Route for each placement that keeps something which this prefill rank sends.

    Of several owners of a short prompt some keep none of its tokens: an empty range, no Route.
    Raises InvalidValue, naming the field, for a placement that can't be written page by page.
    """
    sent = sent_heads(shard)
    found = []
    for index, p in enumerate(placements):
        _check(index, p, page_size)
        layers = range(max(shard.layer_start, p.layer_start), min(shard.layer_stop, p.layer_stop))
        heads = range(max(sent.start, p.head_start), min(sent.stop, p.head_stop))
        if not layers or not heads or p.token_start == p.token_stop:
            continue
        found.append(
            Route(
                index=index,
                node=p.node,
                tp_rank=p.tp_rank,
                layers=layers,
                heads=heads,
                tokens=range(p.token_start, p.token_stop),
                src_layer=layers.start - shard.layer_start,
                dst_layer=layers.start - p.layer_start,
                src_head=heads.start - shard.kv_heads.start,
                dst_head=heads.start - p.head_start,
                pages=tuple(p.pages),
                page_size=page_size,
            )
        )
    return tuple(found)


def sent_heads(shard: Shard) -> range:
    """Global KV heads that no lower TP rank of this replica holds; possibly empty."""
    heads = shard.kv_heads
    below = (replace(shard, tp_rank=rank).kv_heads for rank in range(shard.tp_rank))
    start = max((b.stop for b in below), default=heads.start)
    return range(max(heads.start, start), heads.stop) if start < heads.stop else range(0)


def reach(shard: Shard, found: Sequence[Route]) -> int:
    """Tokens from 0 on for which every layer and head that this rank sends has an owner.

    A prompt longer than this would silently lose KV. A rank that sends nothing loses nothing: its
    reach is unbounded (sys.maxsize).
    """
    heads = sent_heads(shard)
    if not heads or not shard.layers:
        return sys.maxsize
    layers = {shard.layer_start} | {r.layers.start for r in found} | {r.layers.stop for r in found}
    first_heads = {heads.start} | {r.heads.start for r in found} | {r.heads.stop for r in found}
    reached = []
    for layer in layers & set(shard.layers):
        for head in first_heads & set(heads):
            covered = 0
            for tokens in sorted(
                (r.tokens.start, r.tokens.stop)
                for r in found
                if layer in r.layers and head in r.heads
            ):
                if tokens[0] <= covered:
                    covered = max(covered, tokens[1])
            reached.append(covered)
    return min(reached)


def pieces(route: Route, layer: int, start: int, stop: int) -> list[Piece]:
    """The pieces of `layer` that hold those tokens of [start, stop) which `route` carries.

    `layer` is global; a layer that the route doesn't carry has none.
    """
    if layer not in route.layers:
        return []
    start, stop = max(start, route.tokens.start), min(stop, route.tokens.stop)
    size = route.page_size
    src_heads = range(route.src_head, route.src_head + len(route.heads))
    dst_heads = range(route.dst_head, route.dst_head + len(route.heads))
    found = []
    while start < stop:
        page = start // size
        end = min(stop, (page + 1) * size)
        found.append(
            Piece(
                src_page=page,
                dst_page=route.pages[page - route.tokens.start // size],
                src_heads=src_heads,
                dst_heads=dst_heads,
                first_slot=start - page * size,
                last_slot=end - page * size,
            )
        )
        start = end
    return found


def _check(index: int, p: PlacementLike, page_size: int) -> None:
    name = f"placements[{index}]"
    if p.token_start % page_size:
        raise InvalidValue(
            f"{name}.token_start", p.token_start, f"must be a multiple of page_size={page_size}"
        )
    for what in ("layer", "head", "token"):
        first, last = getattr(p, f"{what}_start"), getattr(p, f"{what}_stop")
        if first > last or (first == last and what != "token"):
            raise InvalidValue(f"{name}.{what}_stop", last, f"must be above {what}_start={first}")
    needed = -(-(p.token_stop - p.token_start) // page_size)
    if len(p.pages) < needed:
        raise ProtocolError(
            f"{name}.pages={len(p.pages)} pages: {needed} of {page_size} tokens are needed for "
            f"tokens [{p.token_start}, {p.token_stop}); reserve again"
        )
