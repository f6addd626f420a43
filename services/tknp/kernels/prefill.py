"""Causal attention of a prompt's chunk by the CPU kernels, bfloat16.

Bitwise independent of how a prompt is cut into chunks and of the number of threads. It sums in
another order than decode does: for a cache that is bitwise what decoding the same tokens one by one
would have written, feed the chunk to `KernelDecodeAttention` as rows of growing length instead.
"""

from __future__ import annotations

from ctypes import byref

from torch import Tensor

from tknp.attention.base import AttentionShape, RopeTable
from tknp.errors import InvalidValue
from tknp.kernels.decode import check_pages, check_rope, heads_of
from tknp.kernels.library import check, load, threads


class KernelPrefillAttention:
    """What `tknp.attention.prefill.PrefillAttention` offers; errors as KernelDecodeAttention."""

    def __init__(self, shape: AttentionShape, rope: RopeTable) -> None:
        self.shape = shape
        self.rope = check_rope(shape, rope)
        self._library = load()
        self._heads = heads_of(shape, self.rope)

    def attend(self, qkv: Tensor, start: int, block_table: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `PrefillAttention.attend`: appends the chunk, returns [n, Hq dh]."""
        shape, n = self.shape, qkv.shape[0]
        room = min(len(block_table) * shape.page_size, len(self.rope[0]))
        if not 0 <= start <= room - n:
            remedy = f"{n} tokens from there must end by {room}, the end of pages or rotary table"
            raise InvalidValue("start", start, remedy)
        table = block_table.int().contiguous()
        used = table[: -(-(start + n) // shape.page_size)]
        lowest, highest = (int(x) for x in used.aminmax()) if n else (0, 0)
        if lowest < 0:
            raise InvalidValue("block_table", lowest, "entries are page ids")
        check_pages(shape, qkv, n, k, v, highest)
        out = qkv.new_empty(n, shape.q_width)
        if n == 0:
            return out
        qkv = qkv.contiguous()
        status = self._library.prefill(
            byref(self._heads), qkv.data_ptr(), start, n, table.data_ptr(), k.data_ptr(),
            v.data_ptr(), out.data_ptr(), threads(),
        )  # fmt: skip
        check(status)
        return out
