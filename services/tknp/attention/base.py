"""Decode attention over pages: one query token a row, exact output and log-sum-exp (LSE).

A step's rows are described once (`DecodeRows`), planned once (`plan`) and then used for every layer
(`attend`), because only q, k, v and the layer's pages change from layer to layer:

    rows of this owner --plan--> index tensors --attend(layer 0)--> out, lse
                                       |--------attend(layer 1)--> out, lse   ...

`attend` rotates q and k at the rows' positions, appends k and v to the pages and attends. A row
that doesn't append only attends: another owner holds the current token (sequence sharding), or the
row pads a batch; its key and value go to the dummy page 0, which nobody reads.

The LSE is in base e on every backend, so that outputs of several owners merge
(`tknp.attention.merge`). A row of length 0 has output 0 and LSE -inf; zero rows return empty
tensors. Pages that no row names, and slots beyond a row's length, may hold anything, NaN included.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from tknp.errors import InvalidValue
from tknp.kv.pages import DUMMY_PAGE
from tknp.model.shard import Shard

RopeTable = tuple[Tensor, Tensor]
"""Cosines and sines, float32 [max_position, head_dim / 2] each."""


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one rank and the tokens of a page."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int

    def __post_init__(self) -> None:
        for name in ("q_heads", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "must be at least 1")
        if self.q_heads % self.kv_heads:
            remedy = f"must be a multiple of kv_heads={self.kv_heads}"
            raise InvalidValue("q_heads", self.q_heads, remedy)

    @classmethod
    def of(cls, shard: Shard, page_size: int) -> AttentionShape:
        """The shape of one rank's shard."""
        heads = len(shard.q_heads), len(shard.kv_heads)
        return cls(*heads, shard.config.head_dim, page_size)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @cached_property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def qkv_width(self) -> int:
        """Elements of one projected row [q | k | v]."""
        return self.q_width + 2 * self.kv_width

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def check(self, qkv: Tensor, rows: int, k: Tensor, v: Tensor) -> None:
        """InvalidValue unless `qkv` is [rows, qkv_width] and fits the pages `k`, `v`."""
        if qkv.shape != (rows, self.qkv_width):
            remedy = f"[q | k | v] of these rows is [{rows}, {self.qkv_width}]"
            raise InvalidValue("qkv.shape", tuple(qkv.shape), remedy)
        expected = (self.kv_heads, self.page_size, self.head_dim)
        for name, pages in (("k", k), ("v", v)):
            if pages.shape[1:] != expected:
                remedy = f"pages are [pages, {', '.join(map(str, expected))}]"
                raise InvalidValue(f"{name}.shape", tuple(pages.shape), remedy)
            if pages.dtype != qkv.dtype:
                raise InvalidValue(f"{name}.dtype", pages.dtype, f"qkv is {qkv.dtype}")


@dataclass(frozen=True)
class DecodeRows:
    """The rows of one owner in one step.

    block_tables  int32 [R, max_pages]  page ids in token order; entries past `lengths` are ignored
    positions     int32 [R]             absolute position of the current token, for the rotary
    lengths       int32 [R]             KV tokens in this owner's pages to attend, the appended one
                                        included; may be 0
    append        bool [R]              store the current token's k and v at slot `lengths - 1`
    """

    block_tables: Tensor
    positions: Tensor
    lengths: Tensor
    append: Tensor

    @property
    def rows(self) -> int:
        return self.lengths.shape[0]

    def check(self, page_size: int, max_position: int) -> None:
        """InvalidValue if a row would read or write outside its pages or the rotary table.

        Reads the tensors' values, so on a GPU it waits for the device.
        """
        self.check_shapes()
        if self.rows == 0:
            return
        _check_range("lengths", self.lengths, 0, self.block_tables.shape[1] * page_size)
        _check_range("positions", self.positions, 0, max_position - 1)
        if bool((self.append & (self.lengths == 0)).any()):
            raise InvalidValue("lengths", 0, "a row that appends counts its token: at least 1")

    def check_shapes(self) -> None:
        """InvalidValue unless the four tensors describe the same rows."""
        rows = self.rows
        for name in ("positions", "append"):
            shape = tuple(getattr(self, name).shape)
            if shape != (rows,):
                raise InvalidValue(name, shape, f"must have shape [{rows}] as lengths has")
        if self.block_tables.dim() != 2 or self.block_tables.shape[0] != rows:
            shape = tuple(self.block_tables.shape)
            raise InvalidValue("block_tables", shape, f"must have shape [{rows}, max_pages]")

    def append_slots(self, page_size: int) -> tuple[Tensor, Tensor]:
        """Page and slot, int64 [R] each, that a row's token is stored at.

        Rows that don't append point to the dummy page, never to a last slot through index -1.
        """
        if not self.block_tables.shape[1]:
            nowhere = torch.zeros_like(self.lengths, dtype=torch.int64)
            return nowhere, nowhere
        last = (self.lengths.long() - 1).clamp(min=0)
        pages = self.block_tables.long().gather(1, (last // page_size).unsqueeze(1)).squeeze(1)
        zero = last.new_zeros(())
        return (
            torch.where(self.append, pages, zero + DUMMY_PAGE),
            torch.where(self.append, last % page_size, zero),
        )


def _check_range(name: str, values: Tensor, low: int, high: int) -> None:
    smallest, largest = (int(value) for value in values.aminmax())
    if smallest < low or largest > high:
        wrong = smallest if smallest < low else largest
        raise InvalidValue(name, wrong, f"must be in {low}..{high} for these pages")


PlanT = TypeVar("PlanT")


class DecodeAttention(Protocol[PlanT]):
    """What every backend offers. A plan serves only the backend that made it."""

    def plan(self, rows: DecodeRows) -> PlanT:
        """Prepare what all layers of one step share. InvalidValue for impossible rows."""
        ...

    def attend(self, plan: PlanT, qkv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate, append and attend, one layer.

        qkv   [R, (Hq + 2 Hkv) dh] projected rows [q | k | v] of this rank, not yet rotated
        k, v  [pages, Hkv, page_size, dh] of the layer, appended to in place; dtype as qkv

        Returns out [R, Hq dh] in the dtype of qkv and lse float32 [R, Hq], base e.
        """
        ...
