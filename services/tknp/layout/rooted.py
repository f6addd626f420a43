"""Programs of strategies whose layers each have one root: tknp, dp, tp, pp.

For layer l with root r and any other node g that owns rows, between ranks of equal t:

    (r, t):  Project  Scatter(r -> g)  Attend(own rows)  Gather(g -> r)  [Merge]  Finish
    (g, t):           Scatter(r -> g)  Attend(own rows)  Gather(g -> r)

At the end of a block the residual stream is handed to the next root; the last one hands it to the
sampler where the embeddings are tied. Ids go from the sampler to the first root. A node without
rows takes no part in attention. Nothing depends on context length.

A wide row (several owners) is scattered to all of them: q, k and v to its appender, q alone to the
others. They return partial outputs with LSE, which the root merges. In a pipeline the root attends
to all rows itself, so that only handoffs cross nodes; dp and tp are pools of one node.

Sources: Decode Token Parallelism, sections 4.1 to 4.4; width as in Helix Parallelism, section 2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Transfer
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.wire import ids_home, logits_home, transfer
from tknp.model.config import RESIDUAL_BYTES


class _Part(NamedTuple):
    """Rows [start, stop) that a node attends to; `whole`: it appends, so it needs k and v."""

    start: int
    stop: int
    partial: bool
    whole: bool


@dataclass(frozen=True)
class _Step:
    """One step of one stream, seen from `rank`."""

    layout: Layout
    stream: int
    groups: Sequence[Group]
    rank: Rank

    @cached_property
    def batch(self) -> int:
        return sum(group.rows for group in self.groups)

    @cached_property
    def spans(self) -> list[tuple[Group, int, int]]:
        stops = list(accumulate(group.rows for group in self.groups))
        return [
            (group, stop - group.rows, stop) for group, stop in zip(self.groups, stops, strict=True)
        ]

    @cached_property
    def merged(self) -> list[tuple[Group, int, int]]:
        """Groups whose rows have several parts."""
        divided = self.layout.divides == "tokens"
        return [(g, start, stop) for g, start, stop in self.spans if divided and g.wide]

    def parts(self, node: int, root: int) -> list[_Part]:
        """What `node` attends to in a layer that `root` roots."""
        if self.layout.divides != "tokens":
            return [_Part(0, self.batch, False, True)] if node == root else []
        return [
            _Part(start, stop, group.wide, node == group.appender)
            for group, start, stop in self.spans
            if node in group.owners
        ]

    def owners(self, root: int) -> list[tuple[int, list[_Part]]]:
        """Nodes but `root` that attend to rows of its layer."""
        nodes = (n for n in self.layout.owners[self.stream] if n != root)
        return [(n, parts) for n in nodes if (parts := self.parts(n, root))]


def operations(layout: Layout, stream: int, groups: Sequence[Group], rank: Rank) -> Iterator[Op]:
    """Operations of `rank` for a step of `stream` with at least one row."""
    step = _Step(layout, stream, groups, rank)
    batch, roots = step.batch, layout.routes[stream]
    if rank.node == layout.first_root(stream):
        yield Op(Kind.EMBED, 0, batch)
        yield from _reduce(step, RESIDUAL_BYTES)

    @cache
    def one_layer(root: int) -> tuple[Op, ...]:
        """What `rank` does in a layer of `root`, the same in all of them."""
        if rank.node == root:
            return tuple(_root(step))
        parts = step.parts(rank.node, root)
        return tuple(_owner(step, Rank(root, rank.t), parts)) if parts else ()

    for layer, root in enumerate(roots):
        for op in one_layer(root):
            yield replace(op, layer=layer)
        last = layer + 1 == len(roots)
        receiver = layout.sampler(stream) if last else roots[layer + 1]
        if receiver != root and rank.node in (root, receiver):
            src, dst = Rank(root, rank.t), Rank(receiver, rank.t)
            moved = (transfer(layout, src, dst, 0, batch, layout.config.hidden_size, "x"),)
            sends, recvs = (moved, ()) if rank == src else ((), moved)
            yield Op(Kind.HANDOFF, 0, batch, layer, sends, recvs)
    if rank.node == layout.sampler(stream):
        yield logits_home(layout, layout.sampler(stream), batch, rank)
    yield from ids_home(layout, stream, batch, rank)


def _root(step: _Step) -> Iterator[Op]:
    layout, rank, batch = step.layout, step.rank, step.batch
    others = step.owners(rank.node)
    out = tuple(
        _scattered(layout, rank, Rank(node, rank.t), part)
        for node, parts in others
        for part in parts
    )
    back = tuple(
        moved
        for node, parts in others
        for part in parts
        for moved in _gathered(layout, Rank(node, rank.t), rank, part)
    )
    yield Op(Kind.PROJECT, 0, batch)
    if out:
        yield Op(Kind.SCATTER, 0, batch, sends=out)
    for part in step.parts(rank.node, rank.node):
        yield Op(Kind.ATTEND, part.start, part.stop, partial=part.partial)
    if back:
        yield Op(Kind.GATHER, 0, batch, recvs=back)
    for group, start, stop in step.merged:
        yield Op(Kind.MERGE, start, stop, owners=group.owners)
    if layout.tp == 1:
        yield Op(Kind.FINISH, 0, batch)
        return
    yield Op(Kind.OUTPUT, 0, batch)
    yield from _reduce(step, layout.item_bytes)
    yield Op(Kind.MLP, 0, batch)
    yield from _reduce(step, layout.item_bytes)


def _owner(step: _Step, root: Rank, parts: list[_Part]) -> Iterator[Op]:
    layout, rank = step.layout, step.rank
    start, stop = parts[0].start, parts[-1].stop
    qkv = tuple(_scattered(layout, root, rank, part) for part in parts)
    yield Op(Kind.SCATTER, start, stop, recvs=qkv)
    for part in parts:
        yield Op(Kind.ATTEND, part.start, part.stop, partial=part.partial)
    out = tuple(moved for part in parts for moved in _gathered(layout, rank, root, part))
    yield Op(Kind.GATHER, start, stop, sends=out)


def _scattered(layout: Layout, root: Rank, owner: Rank, part: _Part) -> Transfer:
    heads = layout.heads(owner)
    if part.whole:
        return transfer(layout, root, owner, part.start, part.stop, heads.qkv_width, "qkv")
    return transfer(layout, root, owner, part.start, part.stop, heads.q_width, "q")


def _gathered(layout: Layout, owner: Rank, root: Rank, part: _Part) -> Iterator[Transfer]:
    heads, rows = layout.heads(owner), (part.start, part.stop)
    yield transfer(layout, owner, root, *rows, heads.q_width, "attention")
    if part.partial:
        yield transfer(layout, owner, root, *rows, len(heads.q_heads), "lse")


def _reduce(step: _Step, size: int) -> Iterator[Op]:
    if step.layout.tp > 1:
        operand = step.batch * step.layout.config.hidden_size * size
        yield Op(Kind.ALL_REDUCE, 0, step.batch, operand_bytes=operand)
