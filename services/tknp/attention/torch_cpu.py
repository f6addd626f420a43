"""Decode attention on CPU with torch's own kernels; reads the pages where they lie.

Copying a row's pages together costs more than attending to them, so every page is a batch row of
one flash attention call, queried by the request that owns it, and the partial outputs of a
request's pages are merged by their LSE:

    pool   |.|A0 A1 A2|B0 B1|. .|A3|      full pages: one call for each run of adjacent pages
                              |B2 |       last page, partly filled: one call for its filled slots
    calls -> out, lse of each piece -> merge A0..A3 -> row A, B0..B2 -> row B

The query heads of a KV head are folded into query rows, so K and V are never expanded. Slots beyond
a row's length and pages of others are never read.

A piece's result depends on nothing but the piece, and pieces are summed in token order, one by one:
rows come out bitwise equal in any batch, on any pages, with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from tknp.attention.append import AppendPlan, rotate_and_append
from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.attention.flash import flash_with_lse


@dataclass(frozen=True)
class Run:
    """One call: pages [page, page + count), `tokens` slots of each, pieces first .. first+count."""

    page: int
    count: int
    tokens: int
    first: int


@dataclass(frozen=True)
class TorchCpuPlan:
    """Pieces (a page of a row each) in the order of the calls, and how they merge into rows.

    owners         int64 [N]       row that each piece belongs to
    by_row         int64 [N]       pieces ordered by row, in a row by token
    row_of         int64 [N]       row of `by_row`
    pieces         int64 [R]       pieces of each row
    bag_pieces     int64 [Hq * N]  piece * Hq + head, ordered by head, row, token
    bag_starts     int64 [Hq * R]  where the bag of (head, row) starts in `bag_pieces`
    """

    rows: int
    append: AppendPlan
    runs: tuple[Run, ...]
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
        tail_row = rest.nonzero().squeeze(1)
        tail_pages = rows.block_tables[tail_row, filled[tail_row]].long()

        owners = torch.cat((full_row[order], tail_row))
        token_order = torch.cat((full_column[order], filled[tail_row]))
        by_row = (owners * (columns.shape[0] + 1) + token_order).argsort()
        pieces = torch.bincount(owners, minlength=rows.rows)
        head = torch.arange(shape.q_heads).unsqueeze(1)
        return TorchCpuPlan(
            rows=rows.rows,
            append=AppendPlan.of(rows, self.rope, shape.page_size),
            runs=(
                *_runs(full_pages, shape.page_size),
                *_tails(tail_pages, rest[tail_row], full_pages.shape[0]),
            ),
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
        q = rotate_and_append(shape, plan.append, qkv, k, v)
        if not plan.runs:
            lse = q.new_full((plan.rows, shape.q_heads), -torch.inf, dtype=torch.float32)
            return q.new_zeros(plan.rows, shape.q_width), lse
        groups = q.reshape(plan.rows, shape.kv_heads, shape.group, shape.head_dim)[plan.owners]
        parts = [self._attend_run(run, groups, k, v) for run in plan.runs]
        outs = torch.cat([out.reshape(-1, shape.head_dim) for out, _ in parts])
        lses = torch.cat([lse.reshape(-1, shape.q_heads) for _, lse in parts])
        out, lse = self._merge(plan, outs.float(), lses)
        return out.to(qkv.dtype), lse

    def _attend_run(self, run: Run, groups: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        pages = slice(run.page, run.page + run.count)
        queries = groups[run.first : run.first + run.count]
        keys, values = k[pages, :, : run.tokens], v[pages, :, : run.tokens]
        return flash_with_lse(queries, keys, values, self.shape.scale)

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


def _runs(pages: Tensor, page_size: int) -> list[Run]:
    """Runs of adjacent page ids in ascending `pages`."""
    if not pages.numel():
        return []
    breaks = (pages.diff() != 1).nonzero().squeeze(1) + 1
    starts = [0, *breaks.tolist()]
    stops = [*breaks.tolist(), pages.shape[0]]
    ids = pages.tolist()
    return [Run(ids[a], b - a, page_size, a) for a, b in zip(starts, stops, strict=True)]


def _tails(pages: Tensor, tokens: Tensor, first: int) -> list[Run]:
    """One run for each partly filled last page."""
    tails = zip(pages.tolist(), tokens.tolist(), strict=True)
    return [Run(page, 1, count, first + i) for i, (page, count) in enumerate(tails)]
