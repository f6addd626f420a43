"""Decode attention by brute force: the oracle that every backend is tested against.

Row by row and head by head, in float64, gathering each row's tokens one by one. Nothing here is
shared with the other backends but the rotary embedding. Slow on purpose.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.model.rope import apply_rope


class ReferenceAttention:
    """Implements `DecodeAttention` on any device; the plan is the rows themselves."""

    def __init__(self, shape: AttentionShape, rope: RopeTable) -> None:
        self.shape = shape
        self.rope = rope

    def plan(self, rows: DecodeRows) -> DecodeRows:
        rows.check(self.shape.page_size, self.rope[0].shape[0])
        return rows

    def attend(self, plan: DecodeRows, qkv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shape = self.shape
        shape.check(qkv, plan.rows, k, v)
        out = qkv.new_zeros(plan.rows, shape.q_heads, shape.head_dim)
        lse = out.new_full((plan.rows, shape.q_heads), -torch.inf, dtype=torch.float32)
        for row in range(plan.rows):
            q = self._append(plan, row, qkv[row], k, v)
            length = int(plan.lengths[row])
            if length == 0:
                continue
            slots = [self._slot(plan, row, token) for token in range(length)]
            for head in range(shape.q_heads):
                kv_head = head // shape.group
                keys = torch.stack([k[page, kv_head, slot] for page, slot in slots]).double()
                values = torch.stack([v[page, kv_head, slot] for page, slot in slots]).double()
                scores = keys @ q[head].double() * shape.scale
                out[row, head] = (scores.softmax(0) @ values).to(out.dtype)
                lse[row, head] = scores.logsumexp(0)
        return out.flatten(1), lse

    def _append(self, rows: DecodeRows, row: int, qkv: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store the row's key and value if it appends; its rotated query [Hq, dh]."""
        shape = self.shape
        heads = qkv.reshape(1, -1, shape.head_dim)
        position = int(rows.positions[row])
        cos, sin = (table[position : position + 1] for table in self.rope)
        q = apply_rope(heads[:, : shape.q_heads], cos, sin)[0]
        if rows.append[row]:
            page, slot = self._slot(rows, row, int(rows.lengths[row]) - 1)
            first_key, first_value = shape.q_heads, shape.q_heads + shape.kv_heads
            k[page, :, slot] = apply_rope(heads[:, first_key:first_value], cos, sin)[0]
            v[page, :, slot] = heads[0, first_value:]
        return q

    def _slot(self, rows: DecodeRows, row: int, token: int) -> tuple[int, int]:
        page = int(rows.block_tables[row, token // self.shape.page_size])
        return page, token % self.shape.page_size
