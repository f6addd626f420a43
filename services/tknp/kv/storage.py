"""The memory behind the pages of one rank.

One tensor [layers, 2, pages, kv_heads, page_size, head_dim]; index 1 is keys 0, values 1. Per layer
a page of one head is one run of memory, which is what attention reads and a transfer writes.

Zero-initialised: attention may read a slot that nobody wrote with weight zero, and zero times a NaN
left over in fresh memory is NaN.
"""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor

from tknp.errors import InvalidValue

_MADV_HUGEPAGE = 14  # linux/mman.h
_HUGE_PAGE_BYTES = 2 << 20


class KvStorage:
    """KV pages of `layers` layers on one rank; `kv_heads` are this rank's own.

    `device` may be any torch device. On Linux CPUs the memory is offered to transparent huge pages.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = (layers, 2, pages, kv_heads, page_size, head_dim)
        names = ("layers", "", "pages", "kv_heads", "page_size", "head_dim")
        for name, value in zip(names, self.shape, strict=True):
            if value < 1:
                raise InvalidValue(name, value, "must be at least 1")
        self.data = torch.empty(self.shape, dtype=dtype, device=device)
        if self.data.device.type == "cpu":
            _advise_huge_pages(self.data)
        self.data.zero_()

    def fill(self, seed: int) -> None:
        """Pseudo-random values in every page, of about the size that keys and values have."""
        generator = torch.Generator(self.data.device).manual_seed(seed)
        for layer in self.data:  # one at a time: the generator may need room of its own
            layer.normal_(generator=generator)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers, keys and values."""
        return self.nbytes // self.shape[2]

    @property
    def run_bytes(self) -> int:
        """Bytes of one head of one page of one layer's keys (or values): contiguous memory.

        The heads of a page follow each other, so `n` heads are one run of n times as many bytes.
        """
        return self.shape[4] * self.shape[5] * self.data.element_size()

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, views [pages, kv_heads, page_size, head_dim]."""
        return self.data[layer, 0], self.data[layer, 1]

    def offset(self, layer: int, kv: int, page: int, head: int = 0) -> int:
        """Byte offset from `data.data_ptr()` of a run: layer, keys 0 or values 1, page, head."""
        for name, value, size in zip(
            ("layer", "kv", "page", "head"), (layer, kv, page, head), self.shape, strict=False
        ):
            if not 0 <= value < size:
                raise InvalidValue(name, value, f"must be in 0..{size - 1}")
        _, _, pages, heads, _, _ = self.shape
        return (((layer * 2 + kv) * pages + page) * heads + head) * self.run_bytes


def _advise_huge_pages(tensor: Tensor) -> None:
    """Ask for huge pages before the first touch; attention reads up to a third faster.

    Best effort: kernels without them, or other systems, keep small pages.
    """
    start = -(-tensor.data_ptr() // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    stop = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if sys.platform != "linux" or stop <= start:
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(start, stop - start, _MADV_HUGEPAGE)
