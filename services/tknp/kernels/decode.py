"""Decode attention by the CPU kernels, bfloat16.

`plan` cuts rows into items of 256 tokens once a step; `attend` runs them for one layer. A plan and
an instance never change, so any number of threads may use them at a time.
"""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.errors import InvalidValue
from tknp.kernels.library import Heads, Step, load, threads

ITEM_TOKENS = 256  # csrc/attention_block.h
PAGE_MULTIPLE = 16


@dataclass(frozen=True)
class KernelPlan:
    """A step as the kernels take it. `tensors` are what `step` points to."""

    step: Step
    rows: int
    highest_page: int
    tensors: tuple[Tensor, ...]


class KernelDecodeAttention:
    """Implements `tknp.attention.base.DecodeAttention`. `heads`: as the kernels take them.

    Raises Unavailable where there are no kernels, InvalidValue for head or page sizes that they
    don't have.
    """

    def __init__(self, shape: AttentionShape, rope: RopeTable) -> None:
        self.shape = shape
        self.rope = check_rope(shape, rope)
        self._library = load()
        self.heads = heads_of(shape, self.rope)

    def plan(self, rows: DecodeRows) -> KernelPlan:
        rows.check(self.shape.page_size, self.rope[0].shape[0])
        lengths = rows.lengths.int().contiguous()
        items = int((lengths + (ITEM_TOKENS - 1)).div_(ITEM_TOKENS, rounding_mode="floor").sum())
        tensors = (
            rows.block_tables.int().contiguous(),
            rows.positions.int().contiguous(),
            lengths,
            rows.append.bool().contiguous(),
            torch.empty(items, dtype=torch.int32),
            torch.empty(items, dtype=torch.int32),
            torch.empty(items + 1, dtype=torch.int64),
            torch.empty(rows.rows + 1, dtype=torch.int64),
        )
        addresses = (tensor.data_ptr() for tensor in tensors)
        step = Step(rows.rows, rows.block_tables.shape[1], items, *addresses)
        highest_page = self._library.plan(byref(step), self.shape.page_size)
        if highest_page < 0:
            raise InvalidValue("block_tables", "negative", "entries within lengths are page ids")
        return KernelPlan(step, rows.rows, highest_page, tensors)

    def attend(self, plan: KernelPlan, qkv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        check_pages(self.shape, qkv, plan.rows, k, v, plan.highest_page)
        qkv = qkv.contiguous()
        out = qkv.new_empty(plan.rows, self.shape.q_width)
        lse = torch.empty(plan.rows, self.shape.q_heads)
        status = self._library.attend(
            byref(self.heads), byref(plan.step), qkv.data_ptr(), k.data_ptr(), v.data_ptr(),
            out.data_ptr(), lse.data_ptr(), threads(),
        )  # fmt: skip
        self._library.check(status)
        return out, lse


def check_rope(shape: AttentionShape, rope: RopeTable) -> RopeTable:
    """The tables, contiguous. InvalidValue for sizes that the kernels don't have."""
    if shape.page_size % PAGE_MULTIPLE:
        remedy = f"the CPU kernels need a multiple of {PAGE_MULTIPLE}"
        raise InvalidValue("page_size", shape.page_size, remedy)
    if not load().supports_head_dim(shape.head_dim):
        remedy = "the CPU kernels have 16, 32, 64, 80, 96, 128, 192 and 256"
        raise InvalidValue("head_dim", shape.head_dim, remedy)
    cos, sin = (table.float().contiguous() for table in rope)
    if cos.shape != sin.shape or cos.shape[1:] != (shape.head_dim // 2,):
        remedy = f"cosines and sines are [max_position, {shape.head_dim // 2}]"
        raise InvalidValue("rope", tuple(cos.shape), remedy)
    return cos, sin


def heads_of(shape: AttentionShape, rope: RopeTable) -> Heads:
    """The C structure; points into `rope`, which must outlive it."""
    cos, sin = rope
    sizes = (shape.q_heads, shape.kv_heads, shape.head_dim, shape.page_size)
    return Heads(*sizes, cos.data_ptr(), sin.data_ptr(), shape.scale)


def check_pages(
    shape: AttentionShape, qkv: Tensor, rows: int, k: Tensor, v: Tensor, highest_page: int
) -> None:
    """InvalidValue unless the kernels may touch `k` and `v` up to `highest_page`."""
    shape.check(qkv, rows, k, v)
    if qkv.dtype != torch.bfloat16:
        raise InvalidValue("qkv.dtype", qkv.dtype, "the CPU kernels take bfloat16")
    if not (k.is_contiguous() and v.is_contiguous()):
        raise InvalidValue("k", k.stride(), "a layer's pages must be contiguous")
    if highest_page >= min(k.shape[0], v.shape[0]):
        raise InvalidValue("block_tables", highest_page, f"there are {k.shape[0]} pages")
