"""Causal attention of a prompt's chunk by the CPU kernels, and whole layers of it, bfloat16.

Bitwise independent of how a prompt is cut into chunks and of the number of threads. It sums in
another order than decode does: for a cache that is bitwise what decoding the same tokens one by one
would have written, feed the chunk to `KernelDecodeAttention` as rows of growing length instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import addressof, byref, c_double, c_void_p, sizeof

import torch
from torch import Tensor

from tknp.attention.base import AttentionShape, RopeTable
from tknp.errors import InvalidValue
from tknp.kernels.decode import check_pages, check_rope, heads_of
from tknp.kernels.dense import KernelDense
from tknp.kernels.library import Layers, load, threads
from tknp.model.dense import check_whole

PARTS = 3  # of a layer: project, attend, finish
_POINTER = sizeof(c_void_p)


class KernelPrefillAttention:
    """What `tknp.attention.prefill.PrefillAttention` offers; errors as KernelDecodeAttention."""

    def __init__(self, shape: AttentionShape, rope: RopeTable) -> None:
        self.shape = shape
        self.rope = check_rope(shape, rope)
        self._library = load()
        self.heads = heads_of(shape, self.rope)

    def attend(self, qkv: Tensor, start: int, block_table: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `PrefillAttention.attend`: appends the chunk, returns [n, Hq dh]."""
        shape, n = self.shape, qkv.shape[0]
        table, highest = self.table(start, n, block_table)
        check_pages(shape, qkv, n, k, v, highest)
        out = qkv.new_empty(n, shape.q_width)
        if n == 0:
            return out
        qkv = qkv.contiguous()
        status = self._library.prefill(
            byref(self.heads), qkv.data_ptr(), start, n, table.data_ptr(), k.data_ptr(),
            v.data_ptr(), out.data_ptr(), threads(),
        )  # fmt: skip
        self._library.check(status)
        return out

    def table(self, start: int, n: int, block_table: Tensor) -> tuple[Tensor, int]:
        """`block_table` as the kernels take it, and the highest page that `n` tokens from `start`
        on use. InvalidValue where they don't fit."""
        room = min(len(block_table) * self.shape.page_size, len(self.rope[0]))
        if not 0 <= start <= room - n:
            remedy = f"{n} tokens from there must end by {room}, the end of pages or rotary table"
            raise InvalidValue("start", start, remedy)
        table = block_table.int().contiguous()
        used = table[: -(-(start + n) // self.shape.page_size)]
        lowest, highest = (int(x) for x in used.aminmax()) if n else (0, 0)
        if lowest < 0:
            raise InvalidValue("block_table", lowest, "entries are page ids")
        return table, highest


class KernelPrefillLayers:
    """Layers of a chunk in one call, bitwise as the operations one by one: Python between two
    kernels costs more than it looks, as a kernel leaves nothing of it in the caches.

    Of layers that are held by `dense` and have `pages`, their keys and values. InvalidValue for
    pages that `attention` doesn't take, or where `dense` is one of several ranks. Never changes.
    """

    def __init__(
        self,
        dense: KernelDense,
        attention: KernelPrefillAttention,
        pages: Mapping[int, tuple[Tensor, Tensor]],
    ) -> None:
        check_whole(dense.shard)
        self._library = load()
        self._dense, self._attention = dense, attention
        layers = [layer for layer in dense.shard.layers if layer in pages]
        self._at = {layer: index for index, layer in enumerate(layers)}
        self._pages = [pages[layer] for layer in layers]
        no_rows = torch.empty(0, attention.shape.qkv_width, dtype=torch.bfloat16)
        for k, v in self._pages:
            check_pages(attention.shape, no_rows, 0, k, v, -1)
        self._page_count = min((min(len(k), len(v)) for k, v in self._pages), default=0)
        weights = [addressof(dense.packed(layer)) for layer in layers]
        keys, values = ([pair[i].data_ptr() for pair in self._pages] for i in (0, 1))
        self._arrays = tuple((c_void_p * len(layers))(*a) for a in (weights, keys, values))

    def chunk(
        self, x: Tensor, start: int, block_table: Tensor
    ) -> Callable[[range], tuple[float, ...]]:
        """What passes x float32 [n, D], n > 0 tokens from `start` on, through layers, in place.

        It is called with layers that append the tokens to their pages; returns layer by layer the
        seconds of their three parts. Until then everything is prepared: torch lets go of Python's
        lock in every operation, and another thread may keep it for long. InvalidValue if x, pages
        or `start` don't fit, and from the call if a layer isn't held here.
        """
        n, shape = len(x), self._attention.shape
        expected = n, self._dense.shape.hidden
        if x.dtype != torch.float32 or x.shape != expected or not x.is_contiguous():
            remedy = f"the residual stream is float32 {list(expected)}, contiguous"
            raise InvalidValue("x", (x.dtype, tuple(x.shape)), remedy)
        table, highest = self._attention.table(start, n, block_table)
        if highest >= self._page_count:
            raise InvalidValue("block_table", highest, f"there are {self._page_count} pages")
        qkv = x.new_empty(n, shape.qkv_width, dtype=torch.bfloat16)
        out = x.new_empty(n, shape.q_width, dtype=torch.bfloat16)
        work = (x, qkv, out)  # kept alive by what is returned
        sizes = byref(self._dense.shape), byref(self._attention.heads)
        count = threads()

        def through(layers: range) -> tuple[float, ...]:
            chosen = self._chosen(layers)
            seconds = (c_double * (PARTS * len(layers)))()
            pointers = (tensor.data_ptr() for tensor in work)
            status = self._library.chunk(
                byref(chosen), *sizes, start, n, table.data_ptr(), *pointers, seconds, count
            )
            self._library.check(status)
            return tuple(seconds)

        return through

    def _chosen(self, layers: range) -> Layers:
        first, last = (self._at.get(layer) for layer in (layers[0], layers[-1]))
        if first is None or last is None or last - first != len(layers) - 1:
            raise InvalidValue("layers", layers, f"this rank holds {list(self._at)} with pages")
        return Layers(len(layers), *(addressof(array) + first * _POINTER for array in self._arrays))
