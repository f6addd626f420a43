"""Whole layers of a decode step in one call, bfloat16: x -> project, attend, finish, ... -> x.

For layers between which no rows leave the rank. Results are bitwise those of the operations one by
one; what is saved is a call and a wake-up of the computing threads for each of them.

Never changes after construction, so any number of threads may call one instance at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import addressof, byref, c_double, c_void_p

import torch
from torch import Tensor

from tknp.errors import InvalidValue
from tknp.kernels.decode import KernelDecodeAttention, KernelPlan, check_pages
from tknp.kernels.dense import KernelDense
from tknp.kernels.library import Layers, check, load, threads
from tknp.model.dense import check_whole

PARTS = 3  # of a layer: project, attend, finish
_POINTER = ctypes.sizeof(c_void_p)


class KernelLayers:
    """Layers that are held by `dense` and have `pages`, their keys and values.

    InvalidValue for pages that `attention` doesn't take, or where `dense` is one of several ranks.
    """

    def __init__(
        self,
        dense: KernelDense,
        attention: KernelDecodeAttention,
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
        self._weights = _array([addressof(dense.packed(layer)) for layer in layers])
        self._keys = _array([k.data_ptr() for k, _ in self._pages])
        self._values = _array([v.data_ptr() for _, v in self._pages])

    def run(self, layers: range, plan: KernelPlan, x: Tensor) -> tuple[Tensor, list[float]]:
        """x float32 [rows of `plan`, D] through `layers`, each appending to its pages.

        Returns x, which is reused, and layer by layer the seconds of its three parts. InvalidValue
        if a layer isn't held here, or x or the pages don't fit `plan`.
        """
        first, last = (self._at.get(layer) for layer in (layers[0], layers[-1]))
        if first is None or last is None or last - first != len(layers) - 1:
            raise InvalidValue("layers", layers, f"this rank holds {list(self._at)} with pages")
        expected = plan.rows, self._dense.shape.hidden
        if x.dtype != torch.float32 or x.shape != expected:
            remedy = f"the residual stream is float32 {list(expected)}"
            raise InvalidValue("x", (x.dtype, tuple(x.shape)), remedy)
        if plan.highest_page >= self._page_count:
            remedy = f"there are {self._page_count} pages"
            raise InvalidValue("block_tables", plan.highest_page, remedy)
        x, shape = x.contiguous(), self._attention.shape
        qkv = x.new_empty(plan.rows, shape.qkv_width, dtype=torch.bfloat16)
        out = x.new_empty(plan.rows, shape.q_width, dtype=torch.bfloat16)
        lse = x.new_empty(plan.rows, shape.q_heads)
        seconds = (c_double * (PARTS * len(layers)))()
        arrays = (self._weights, self._keys, self._values)
        chosen = Layers(len(layers), *(addressof(array) + first * _POINTER for array in arrays))
        status = self._library.layers(
            byref(chosen), byref(self._dense.shape), byref(self._attention.heads),
            byref(plan.step), x.data_ptr(), qkv.data_ptr(), out.data_ptr(), lse.data_ptr(),
            seconds, threads(),
        )  # fmt: skip
        check(status)
        return x, seconds[:]


def _array(addresses: list[int]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)
