"""Decode attention on CUDA with torch's variable-length flash attention over a block table.

Needs nothing beyond torch 2.13: FlashAttention 2 as torch ships it. Read from torch's source and
tests, but not yet run on a GPU; `tests/parity/test_attention_cuda.py` runs it where there is one.

What that kernel asks for and gives:
    page size   a multiple of 256
    dtype       float16 or bfloat16
    pages       [pages, page_size, Hkv, dh] by stride, so our [pages, Hkv, page_size, dh] go in as a
                transposed view without a copy
    cu_seq_k    required with a block table although `seqused_k` overrides it (FlashAttention 3
                refuses it: don't register that one here)
    LSE         base e, [Hq, R]; +inf where a row has no tokens, put right here
    splits      chosen by the longest row of the batch, so a row's last bits depend on its
                neighbours; one split (`batch_invariant`) costs occupancy at few rows

`attend` launches kernels of fixed shape and copies nothing to the host. `plan` checks shapes only:
looking at the values would wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from tknp.attention.append import AppendPlan, rotate_and_append
from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.attention.merge import empty_to_minus_inf
from tknp.errors import InvalidValue

PAGE_MULTIPLE = 256


@dataclass(frozen=True)
class TorchCudaPlan:
    """`starts_q` int32 [R + 1]: one query a row. `starts_k` int32 [R + 1]: whole table rows."""

    rows: DecodeRows
    append: AppendPlan
    starts_q: Tensor
    starts_k: Tensor


class TorchCudaAttention:
    """Implements `DecodeAttention` for bfloat16 and float16 on CUDA."""

    def __init__(
        self, shape: AttentionShape, rope: RopeTable, *, batch_invariant: bool = False
    ) -> None:
        if shape.page_size % PAGE_MULTIPLE:
            remedy = f"torch's paged kernel needs a multiple of {PAGE_MULTIPLE}"
            raise InvalidValue("page_size", shape.page_size, remedy)
        self.shape = shape
        self.rope = rope
        self._splits = 1 if batch_invariant else None

    def plan(self, rows: DecodeRows) -> TorchCudaPlan:
        rows.check_shapes()
        starts = torch.arange(rows.rows + 1, dtype=torch.int32, device=rows.lengths.device)
        return TorchCudaPlan(
            rows=rows,
            append=AppendPlan.of(rows, self.rope, self.shape.page_size),
            starts_q=starts,
            starts_k=starts * self._table_tokens(rows),
        )

    def attend(
        self, plan: TorchCudaPlan, qkv: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        shape, rows = self.shape, plan.rows
        shape.check(qkv, rows.rows, k, v)
        if rows.rows == 0:
            lse = qkv.new_empty(0, shape.q_heads, dtype=torch.float32)
            return qkv.new_empty(0, shape.q_width), lse
        q = rotate_and_append(shape, plan.append, qkv, k, v)
        out, lse = varlen_attn(
            q,
            k.transpose(1, 2),
            v.transpose(1, 2),
            plan.starts_q,
            plan.starts_k,
            1,
            self._table_tokens(rows),
            return_aux=AuxRequest(lse=True),
            scale=shape.scale,
            enable_gqa=shape.group > 1,
            seqused_k=rows.lengths,
            block_table=rows.block_tables,
            num_splits=self._splits,
        )
        empty = (rows.lengths == 0).unsqueeze(1)
        lse = empty_to_minus_inf(lse.t()).masked_fill(empty, -torch.inf)
        return out.flatten(1).masked_fill(empty, 0.0), lse

    def _table_tokens(self, rows: DecodeRows) -> int:
        return rows.block_tables.shape[1] * self.shape.page_size
