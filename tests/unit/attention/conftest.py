"""Rows over poisoned pages: whatever a row may not read is NaN or huge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.kv.storage import KvStorage

PAGES = 64


@dataclass
class Case:
    """One layer's pages, rows over them and their projections."""

    shape: AttentionShape
    rope: RopeTable
    rows: DecodeRows
    qkv: Tensor
    storage: KvStorage = field(repr=False)

    def pages(self) -> tuple[Tensor, Tensor]:
        """A copy of keys and values, for one call to append to."""
        k, v = self.storage.layer(0)
        return k.clone(), v.clone()

    def row(self, index: int) -> DecodeRows:
        """Row `index` alone."""
        rows, only = self.rows, slice(index, index + 1)
        return DecodeRows(
            rows.block_tables[only], rows.positions[only], rows.lengths[only], rows.append[only]
        )


def rope_table(head_dim: int, positions: int = 512) -> RopeTable:
    frequencies = 10_000.0 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    angles = torch.arange(positions)[:, None] * frequencies
    return angles.cos(), angles.sin()


def make_case(
    lengths: list[int],
    *,
    group: int = 3,
    kv_heads: int = 2,
    head_dim: int = 16,
    page_size: int = 4,
    dtype: torch.dtype = torch.float32,
    append: list[bool] | None = None,
    position_offset: int = 0,
    poison: float = torch.nan,
    shuffled: bool = True,
    seed: int = 0,
) -> Case:
    """Rows of `lengths` tokens on shuffled pages; all that no row stored is `poison`.

    Rows of length 0 are padding. `position_offset`: tokens of each row that other owners hold.
    """
    random = torch.Generator().manual_seed(seed)
    shape = AttentionShape(group * kv_heads, kv_heads, head_dim, page_size)
    storage = KvStorage(1, PAGES, kv_heads, page_size, head_dim, dtype)
    storage.data.fill_(poison)
    needed = [-(-n // page_size) for n in lengths]
    tables = torch.zeros(len(lengths), max(needed, default=0), dtype=torch.int32)
    order = torch.randperm(PAGES - 1, generator=random) + 1
    free = order.tolist() if shuffled else list(range(PAGES - 1, 0, -1))
    k, v = storage.layer(0)
    for row, count in enumerate(lengths):
        for column in range(needed[row]):
            page = tables[row, column] = free.pop()
            slots = min(page_size, count - column * page_size)
            for pages in (k, v):
                tokens = torch.randn(kv_heads, slots, head_dim, generator=random)
                pages[page, :, :slots] = tokens.to(dtype)
    tokens = torch.tensor(lengths, dtype=torch.int32)
    rows = DecodeRows(
        block_tables=tables,
        positions=(tokens - 1 + position_offset).clamp(min=0),
        lengths=tokens,
        append=tokens > 0 if append is None else torch.tensor(append),
    )
    qkv = torch.randn(len(lengths), shape.qkv_width, generator=random).to(dtype)
    return Case(shape, rope_table(head_dim), rows, qkv, storage)


@pytest.fixture
def case() -> Callable[..., Case]:
    return make_case
