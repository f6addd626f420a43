"""Layer blocks: contiguous ranges of layers, one a root node, cut for equal KV budgets or times.

Source: Decode Token Parallelism, sections 4.2 and 4.5. Endpoint parameters count: the first block
carries the embedding, the last the final norm and the LM head. Where the embeddings are tied the
first block carries both, so that the matrix is stored once, and the last block hands off to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, combinations, pairwise, product

from tknp.errors import InvalidValue
from tknp.model.footprint import Footprint

ATTENTION_RATIO = 1.0  # time of a layer's attention over its dense work, where it follows blocks


@dataclass(frozen=True)
class Block:
    """Layers [start, stop) and endpoints that one node holds and roots. May be empty."""

    start: int
    stop: int
    embedding: bool = False
    head: bool = False

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)

    @property
    def empty(self) -> bool:
        return self.start == self.stop

    def weight_bytes(self, footprint: Footprint) -> int:
        """Bytes on one TP rank."""
        endpoints = footprint.embedding * self.embedding + footprint.head * self.head
        return sum(footprint.layers[self.start : self.stop]) + endpoints


def cut(footprint: Footprint, memories: Sequence[int], *, tied: bool) -> tuple[Block, ...]:
    """Cut the layers into one non-empty block a root, in order.

    `memories`: bytes of weights plus KV on one rank of each root; only differences matter where all
    are equal. The smallest KV budget (memory minus weights) is as large as contiguous layers
    allow; among such cuts the budgets are as equal as possible. Raises InvalidValue when there are
    more roots than layers.
    """
    layers, roots = len(footprint.layers), len(memories)
    if not 1 <= roots <= layers:
        raise InvalidValue(
            "nodes", roots, f"give 1 to {layers} root nodes, one layer each at least"
        )
    return _cut(footprint, tuple(memories), tied, per_layer=False)


@lru_cache(maxsize=64)
def _cut(
    footprint: Footprint, memories: tuple[int, ...], tied: bool, *, per_layer: bool
) -> tuple[Block, ...]:
    """The cut with the best budgets, each divided by the block's layers if `per_layer`."""
    layers, roots = len(footprint.layers), len(memories)
    before = [0, *accumulate(footprint.layers)]
    extra = [0] * roots
    extra[0] += footprint.embedding
    extra[0 if tied else -1] += footprint.head

    def budget(root: int, start: int, stop: int) -> int:
        whole = memories[root] - extra[root] - (before[stop] - before[start])
        return whole // (stop - start) if per_layer else whole

    # Phase 1: best[l] is the largest possible smallest budget when roots so far hold l layers.
    unreachable = float("-inf")
    best: list[float] = [float("inf")] + [unreachable] * layers
    for root in range(roots):
        best = [
            max(
                (min(best[a], budget(root, a, b)) for a in range(root, b)),
                default=unreachable,
            )
            for b in range(layers + 1)
        ]
    floor = best[layers]
    # Phase 2: among cuts that keep the floor, the least sum of squared budgets above it.
    cost: list[tuple[float, tuple[int, ...]]] = [(0, (0,))]  # exact: squares exceed 2**53
    cost += [(float("inf"), ())] * layers
    for root in range(roots):
        nxt: list[tuple[float, tuple[int, ...]]] = []
        for b in range(layers + 1):
            options = [
                (cost[a][0] + (budget(root, a, b) - floor) ** 2, a)
                for a in range(root, b)
                if cost[a][1] and budget(root, a, b) >= floor
            ]
            value, a = min(options, default=(float("inf"), -1))
            nxt.append((value, (*cost[a][1], b)) if a >= 0 else (value, ()))
        cost = nxt
    return _blocks(cost[layers][1], tied=tied)


def _blocks(stops: Sequence[int], *, tied: bool) -> tuple[Block, ...]:
    """Blocks between `stops`, which begin with 0 and end with the number of layers."""
    last = len(stops) - 2
    return tuple(
        Block(start, stop, embedding=i == 0, head=i == (0 if tied else last))
        for i, (start, stop) in enumerate(pairwise(stops))
    )


def cut_time(
    footprint: Footprint, roots: int, *, tied: bool, attention_ratio: float = 0.0
) -> tuple[Block, ...]:
    """Cut for equal times of blocks, so that nodes whose streams take turns wait for none.

    A layer costs its weights' reads and `attention_ratio` times as much for attention: 0 where
    attention stays with its owners, whoever roots the layer. The head costs its matrix; looking up
    embeddings is free. KV budgets follow, and differ by what is not read.
    """
    layers = tuple(round(size * (1 + attention_ratio)) for size in footprint.layers)
    head = footprint.head + footprint.embedding * tied
    return cut(Footprint(layers, 0, head), [0] * roots, tied=tied)


def cut_pipeline(footprint: Footprint, memories: Sequence[int], *, tied: bool) -> tuple[Block, ...]:
    """Cut for the most tokens in a pool whose every node keeps KV of every token, of its layers.

    The smallest KV budget a layer is as large as contiguous layers allow. Where memories hold no
    KV (they may be unknown, 0), the cut is for equal times.
    """
    blocks = cut(footprint, memories, tied=tied)
    budgets = (m - b.weight_bytes(footprint) for m, b in zip(memories, blocks, strict=True))
    if min(budgets) <= 0:
        return cut_time(
            footprint, len(memories), tied=tied, attention_ratio=ATTENTION_RATIO
        )  # fmt: skip
    return _cut(footprint, tuple(memories), tied, per_layer=True)


def cut_pairs(footprint: Footprint, memories: Sequence[int], *, tied: bool) -> tuple[Block, ...]:
    """Cut into one block a root where roots b and b + R/2 each hold both blocks of the two.

    Begins with `cut` and moves one or two of the borders by a layer as long as that raises the
    smallest KV budget or, at the same smallest, makes budgets more equal. R is even.
    """
    half = len(memories) // 2
    room = [min(memories[b], memories[b + half]) for b in range(half)]

    def quality(blocks: tuple[Block, ...]) -> tuple[int, int]:
        budgets = [
            room[b] - blocks[b].weight_bytes(footprint) - blocks[b + half].weight_bytes(footprint)
            for b in range(half)
        ]
        floor = min(budgets)
        return floor, -sum((budget - floor) ** 2 for budget in budgets)

    best = cut(footprint, [room[b % half] // 2 for b in range(2 * half)], tied=tied)
    improved = True
    while improved:
        improved = False
        stops = [0, *(block.stop for block in best)]
        inner = range(1, len(stops) - 1)
        for first, second in [*((i, i) for i in inner), *combinations(inner, 2)]:
            for here, there in product((-1, 1), repeat=2):
                moved = list(stops)
                moved[first] += here
                moved[second] += there if second != first else 0
                if any(a >= b for a, b in pairwise(moved)):
                    continue
                candidate = _blocks(moved, tied=tied)
                if quality(candidate) > quality(best):
                    best, improved = candidate, True
    return best
