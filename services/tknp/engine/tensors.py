"""What one stream of one rank works on in a step, and where its messages arrive.

Rows of received tensors stand where they stand in the batch, so that operations and transfers name
rows alike at both ends. Buffers are allocated when they are first needed and kept: a layer reuses
those of the layer before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tknp.layout.program import Transfer
from tknp.layout.rank import Rank
from tknp.model.shard import Shard

_DTYPES = {
    "x": torch.float32,
    "lse": torch.float32,
    "logits": torch.float32,
    "ids": torch.int64,
}
_NOTHING = torch.empty(0)


@dataclass
class Tensors:
    """The tensors of the step under way.

    x          float32 [B, D], the residual stream
    qkv        [B, W]; at a root as projected, at an owner as received
    attention  [B, A], what the output projection reads
    partial    [B, D], what the next all-reduce sums
    ids        int64 [B], drawn
    outs       first row of an ATTEND -> its outputs and, where they are partial, their LSE
    """

    heads: Shard
    dtype: torch.dtype
    device: torch.device
    max_rows: int
    x: Tensor = _NOTHING
    qkv: Tensor = _NOTHING
    attention: Tensor = _NOTHING
    partial: Tensor = _NOTHING
    ids: Tensor = _NOTHING

    def __post_init__(self) -> None:
        self.outs: dict[int, tuple[Tensor, Tensor | None]] = {}
        self._buffers: dict[tuple[str, Rank | None, int], Tensor] = {}
        self.qkv_rows = self.buffer("qkv", self.heads.qkv_width)
        self.attention_rows = self.buffer("attention", len(self.heads.output_columns))

    def buffer(self, what: str, width: int, source: Rank | None = None) -> Tensor:
        """[max_rows, width], the same whenever asked for with equal arguments."""
        key = what, source, width
        found = self._buffers.get(key)
        if found is None:
            dtype = _DTYPES.get(what, self.dtype)
            found = torch.zeros(self.max_rows, width, dtype=dtype, device=self.device)
            self._buffers[key] = found
        return found

    def arrives(self, transfer: Transfer) -> Tensor:
        """Where `transfer` arrives, apart from what others send."""
        whole = self.buffer(transfer.what, transfer.width, transfer.src)
        return whole[transfer.start : transfer.stop]

    def out_of(self, start: int) -> tuple[Tensor, Tensor]:
        """Partial output and LSE of the rows attended to from row `start` on."""
        out, lse = self.outs[start]
        if lse is None:
            raise RuntimeError(f"rows from {start} on were attended to without LSE")
        return out, lse
