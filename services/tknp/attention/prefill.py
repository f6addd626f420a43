"""Causal attention of one chunk of one request over its pages.

    past [0, start)                      chunk [start, start + n)
    |page|page|page|pa                   |g e|page|...
    |<- blocks of BLOCK_TOKENS, each ->| |<- causal, straight from the ->|
       seen by every query, gathered         rows at hand
                        \\_______ merge by LSE _______/

No score matrix is kept: both sides are flash attention, so memory grows with n and one block of the
past, not with n times the context.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tknp.attention.append import append, rotate
from tknp.attention.base import AttentionShape, RopeTable
from tknp.attention.flash import flash_with_lse
from tknp.attention.merge import merge
from tknp.errors import InvalidValue

BLOCK_TOKENS = 4096
"""Tokens of the past that are gathered at a time: 2 MiB a KV head of 128 in bfloat16."""


class PrefillAttention:
    """Prefill over pages on any device that `flash_with_lse` serves."""

    def __init__(self, shape: AttentionShape, rope: RopeTable) -> None:
        self.shape = shape
        self.rope = rope

    def attend(self, qkv: Tensor, start: int, block_table: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotate and append the chunk's keys and values, and attend causally to all before.

        qkv          [n, (Hq + 2 Hkv) dh] rows [q | k | v] at positions start .. start + n - 1
        block_table  int32 [max_pages] of the request; tokens [0, start) are in its pages already
        k, v         [pages, Hkv, page_size, dh] of the layer, appended to in place

        Returns [n, Hq dh] in the dtype of qkv. InvalidValue if the pages or the rotary table end
        before the chunk does.
        """
        shape, n = self.shape, qkv.shape[0]
        shape.check(qkv, n, k, v)
        self._check_room(start, n, block_table)
        if n == 0:
            return qkv.new_empty(0, shape.q_width)
        table = block_table.long()
        positions = torch.arange(start, start + n, device=qkv.device)
        cos, sin = (values[start : start + n] for values in self.rope)
        q, k_new, v_new = rotate(shape, qkv, cos, sin)
        pages, slots = table[positions // shape.page_size], positions % shape.page_size
        append(k, v, k_new, v_new, pages, slots)

        queries = q.reshape(n, shape.kv_heads, shape.group, -1).permute(1, 2, 0, 3)
        parts = [self._flash(queries, k_new.transpose(0, 1), v_new.transpose(0, 1), causal=True)]
        for first in range(0, start, self._block):
            stop = min(first + self._block, start)
            keys, values = (self._gather(x, table, first, stop) for x in (k, v))
            parts.append(self._flash(queries, keys, values))
        out = self._merge(parts)
        return out.permute(2, 0, 1, 3).reshape(n, shape.q_width)

    @property
    def _block(self) -> int:
        """Tokens of a block of the past: whole pages."""
        return max(1, BLOCK_TOKENS // self.shape.page_size) * self.shape.page_size

    def _check_room(self, start: int, n: int, block_table: Tensor) -> None:
        room = min(block_table.shape[0] * self.shape.page_size, self.rope[0].shape[0])
        if not 0 <= start <= room - n:
            remedy = f"{n} tokens from there must end by {room}, the end of pages or rotary table"
            raise InvalidValue("start", start, remedy)

    def _gather(self, pages: Tensor, table: Tensor, first: int, stop: int) -> Tensor:
        """Tokens [first, stop), `first` at a page's start, as [Hkv, stop - first, dh]."""
        size = self.shape.page_size
        ids = table[first // size : -(-stop // size)]
        block = pages.index_select(0, ids).transpose(0, 1).flatten(1, 2)
        return block[:, : stop - first]

    def _flash(
        self, queries: Tensor, k: Tensor, v: Tensor, *, causal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """queries [Hkv, G, n, dh], k and v [Hkv, m, dh], shared by the G heads of a group."""
        keys, values = (x.unsqueeze(1).expand(-1, self.shape.group, -1, -1) for x in (k, v))
        return flash_with_lse(queries, keys, values, self.shape.scale, causal=causal)

    def _merge(self, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Parts out [Hkv, G, n, dh], lse [Hkv, G, n] -> out [Hkv, G, n, dh]."""
        if len(parts) == 1:
            return parts[0][0]
        outs, lses = (torch.stack(x) for x in zip(*parts, strict=True))
        return merge(outs, lses)[0]
