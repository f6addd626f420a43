"""Decode attention on CPU with torch's own kernels; reads long runs of pages where they lie.

Making a row's pages one sequence costs more than attending to it: up to four times as much in
float32. So every page is a batch row of a flash attention call, queried by the request that owns
it, and the partial outputs of a request's pages ("pieces") are merged by their LSE:

    pool   |.|A0 A1 .. A8|B0 B1 .. B9|. .|A9|.|B10|
              long run    long run        |    tail, partly filled
              in place    in place        |    in place, filled slots only
                                      scattered: copied together, a call for some dozen
    -> out, lse of each piece -> merge A0..A9 -> row A, B0..B10 -> row B

The query heads of a KV head are folded into query rows, so K and V are never expanded. Slots beyond
a row's length and pages of others are never read.

A piece's result depends on nothing but the piece, and a row's pieces are summed in token order, one
by one: rows come out bitwise equal in any batch, on any pages and with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from tknp.attention.append import AppendPlan, rotate_and_append
from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.attention.flash import flash_with_lse
from tknp.errors import InvalidValue

MIN_RUN_PAGES = 8
"""Shorter runs are copied: a call costs more than the copy of a few pages of 64 tokens."""

GATHER_PAGES = 32
"""Pages copied for one call: the copy stays in the cache and in memory that malloc recycles."""

MIN_QUERY_ROWS = 4
"""Below, MKL splits a float32 product over its threads in an order that depends on their number."""


@dataclass(frozen=True)
class Call:
    """One flash attention over `count` pieces, `first` the first of them.

    Reads slots [0, tokens) of pages [page, page + count), or of the pages `scattered`.
    """

    first: int
    count: int
    tokens: int
    page: int = 0
    scattered: Tensor | None = None


@dataclass(frozen=True)
class TorchCpuPlan:
    """Pieces (one page of one row each) in the order of the calls, and how they merge into rows.

    used         lowest and highest page id that is read
    owners       int64 [N]       row that each piece belongs to
    by_row       int64 [N]       pieces ordered by row, in a row by token
    row_of       int64 [N]       row of `by_row`
    pieces       int64 [R]       pieces of each row
    bag_pieces   int64 [Hq * N]  piece * Hq + head, ordered by head, row, token
    bag_starts   int64 [Hq * R]  where the bag of (head, row) starts in `bag_pieces`
    """

    rows: int
    append: AppendPlan
    calls: list[Call]
    used: tuple[int, int]
    owners: Tensor
    by_row: Tensor
    row_of: Tensor
    pieces: Tensor
    bag_pieces: Tensor
    bag_starts: Tensor


class TorchCpuAttention:
    """Implements `DecodeAttention` for float32, bfloat16 and float16 on CPU."""

    def __init__(self, shape: AttentionShape, rope: RopeTable) -> None:
        self.shape = shape
        self.rope = rope

    def plan(self, rows: DecodeRows) -> TorchCpuPlan:
        shape = self.shape
        rows.check(shape.page_size, self.rope[0].shape[0])
        lengths = rows.lengths.long()
        filled, rest = lengths // shape.page_size, lengths % shape.page_size

        columns = torch.arange(rows.block_tables.shape[1])
        full_row, full_column = (columns < filled.unsqueeze(1)).nonzero(as_tuple=True)
        full_pages, order = rows.block_tables[full_row, full_column].long().sort()
        full_pages, runs_first = _runs_first(full_pages)
        order = order[runs_first]
        tail_row = rest.nonzero().squeeze(1)
        tail_pages = rows.block_tables[tail_row, filled[tail_row]].long()

        pages = torch.cat((full_pages, tail_pages))
        owners = torch.cat((full_row[order], tail_row))
        token_order = torch.cat((full_column[order], filled[tail_row]))
        by_row = (owners * (columns.shape[0] + 1) + token_order).argsort()
        pieces = torch.bincount(owners, minlength=rows.rows)
        head = torch.arange(shape.q_heads).unsqueeze(1)
        return TorchCpuPlan(
            rows=rows.rows,
            append=AppendPlan.of(rows, self.rope, shape.page_size),
            calls=[
                *_full_calls(full_pages, shape.page_size),
                *_tail_calls(tail_pages, rest[tail_row], full_pages.shape[0]),
            ],
            used=(int(pages.min()), int(pages.max())) if pages.numel() else (0, 0),
            owners=owners,
            by_row=by_row,
            row_of=owners[by_row],
            pieces=pieces,
            bag_pieces=(by_row * shape.q_heads + head).flatten(),
            bag_starts=(pieces.cumsum(0) - pieces + head * owners.shape[0]).flatten(),
        )

    def attend(
        self, plan: TorchCpuPlan, qkv: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape = self.shape
        shape.check(qkv, plan.rows, k, v)
        if plan.used[0] < 0 or plan.used[1] >= k.shape[0]:
            remedy = f"page ids must be in 0..{k.shape[0] - 1}, the pages of this rank"
            raise InvalidValue("block_tables", plan.used, remedy)
        q = rotate_and_append(shape, plan.append, qkv, k, v)
        if not plan.calls:
            lse = q.new_full((plan.rows, shape.q_heads), -torch.inf, dtype=torch.float32)
            return q.new_zeros(plan.rows, shape.q_width), lse
        groups = q.reshape(plan.rows, shape.kv_heads, shape.group, shape.head_dim)
        missing = MIN_QUERY_ROWS - shape.group
        if missing > 0 and q.dtype == torch.float32:
            groups = pad(groups, (0, 0, 0, missing))
        groups = groups[plan.owners]
        parts = [self._attend_call(call, groups, k, v) for call in plan.calls]
        outs = torch.cat([out.reshape(-1, shape.head_dim) for out, _ in parts])
        lses = torch.cat([lse.reshape(-1, shape.q_heads) for _, lse in parts])
        out, lse = self._merge(plan, outs.float(), lses)
        return out.to(qkv.dtype), lse

    def _attend_call(
        self, call: Call, groups: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pieces of one call -> out [count, Hkv, G, dh], lse [count, Hkv, G]."""
        if call.scattered is None:
            pages = slice(call.page, call.page + call.count)
            keys, values = k[pages, :, : call.tokens], v[pages, :, : call.tokens]
        else:
            keys, values = (x.index_select(0, call.scattered) for x in (k, v))
        queries = groups[call.first : call.first + call.count]
        out, lse = flash_with_lse(queries, keys, values, self.shape.scale)
        return out[:, :, : self.shape.group], lse[:, :, : self.shape.group]

    def _merge(self, plan: TorchCpuPlan, outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
        """Pieces outs [N * Hq, dh], lses [N, Hq] -> rows out [R, Hq dh], lse [R, Hq]."""
        lses = lses[plan.by_row]
        highest = torch.segment_reduce(lses, "max", lengths=plan.pieces, axis=0, initial=-torch.inf)
        weights = torch.exp(lses - highest[plan.row_of])
        total = torch.segment_reduce(weights, "sum", lengths=plan.pieces, axis=0, initial=0)
        weights = weights / total[plan.row_of]
        sums = embedding_bag(
            plan.bag_pieces,
            outs,
            plan.bag_starts,
            mode="sum",
            per_sample_weights=weights.t().flatten(),
        )
        out = sums.view(self.shape.q_heads, plan.rows, -1).transpose(0, 1).flatten(1)
        return out, highest + total.log()


def _run_starts(pages: Tensor) -> Tensor:
    """Where runs of adjacent ids begin in `pages`: bool, as long as `pages`."""
    starts = torch.ones_like(pages, dtype=torch.bool)
    starts[1:] = pages.diff() != 1
    return starts


def _runs_first(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending `pages` with the scattered ones, in no long run, moved behind; and the order."""
    run_of = _run_starts(pages).cumsum(0) - 1
    scattered = torch.bincount(run_of)[run_of] < MIN_RUN_PAGES
    order = torch.cat(((~scattered).nonzero(), scattered.nonzero())).squeeze(1)
    return pages[order], order


def _full_calls(pages: Tensor, page_size: int) -> list[Call]:
    """Calls for full pages as `_runs_first` orders them."""
    ids = pages.tolist()
    edges = [*_run_starts(pages).nonzero().squeeze(1).tolist(), len(ids)]
    calls = []
    for first, stop in pairwise(edges):
        if stop - first < MIN_RUN_PAGES:
            break
        calls.append(Call(first, stop - first, page_size, page=ids[first]))
    for first in range(sum(call.count for call in calls), len(ids), GATHER_PAGES):
        chunk = pages[first : first + GATHER_PAGES]
        calls.append(Call(first, chunk.shape[0], page_size, scattered=chunk))
    return calls


def _tail_calls(pages: Tensor, tokens: Tensor, first: int) -> list[Call]:
    """One call for each partly filled last page."""
    tails = enumerate(zip(pages.tolist(), tokens.tolist(), strict=True), first)
    return [Call(piece, 1, count, page=page) for piece, (page, count) in tails]
