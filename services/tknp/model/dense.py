"""The dense half of the network: everything but attention, on one shard.

    x = embed(ids)
    for each layer:   qkv = project(layer, x);   attention;   x = finish(layer, x, attention)
    logits = head(x)

The residual stream x is float32 [B, D] in every dtype; weights and matrix products are in the
model dtype. With TP degree T > 1 `output` and `mlp` return this rank's partial sums, `embed` its
vocabulary slice's rows and `head` its slice of the logits: the caller reduces or concatenates.
B may be 0.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from tknp.errors import InvalidValue
from tknp.model.shard import Shard
from tknp.model.weights import ShardWeights


class Dense(Protocol):
    """Dense operations of one shard; W is its width of a QKV row, V_t its vocabulary slice."""

    @property
    def shard(self) -> Shard: ...

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [B] -> float32 [B, D]; zero for ids outside this rank's vocabulary slice."""

    def project(self, layer: int, x: Tensor) -> Tensor:
        """RMSNorm and QKV projection: float32 [B, D] -> [B, W], rows q | k | v before RoPE."""

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        """Output projection and MLP with both residuals, TP degree 1 only; may reuse x."""

    def output(self, layer: int, attention: Tensor) -> Tensor:
        """Partial output projection: [B, Hq_t dh] -> [B, D], to be summed over TP ranks."""

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """RMSNorm and partial SwiGLU MLP: float32 [B, D] -> [B, D], to be summed over TP ranks."""

    def head(self, x: Tensor) -> Tensor:
        """Final RMSNorm and LM head: float32 [B, D] -> float32 logits [B, V_t]."""


class TorchDense:
    """Dense in plain torch, on any device; the reference for every faster implementation."""

    def __init__(self, weights: ShardWeights) -> None:
        self._weights = weights
        self.shard = weights.shard

    def embed(self, ids: Tensor) -> Tensor:
        table = _held(self._weights.embedding, "embedding")
        if len(table) == 0:  # the last ranks of a small vocabulary
            return torch.zeros(len(ids), table.shape[1], device=table.device)
        local = ids - self.shard.vocab.start
        mine = (local >= 0) & (local < len(table))
        rows = F.embedding(local.clamp(0, len(table) - 1), table).float()
        return rows.masked_fill(~mine[:, None], 0.0)

    def project(self, layer: int, x: Tensor) -> Tensor:
        w = self._weights.layers[layer]
        return F.linear(self._norm(x, w.input_norm), w.qkv)

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        if self.shard.tp > 1:
            raise InvalidValue("tp", self.shard.tp, "sum output() and mlp() over the TP ranks")
        x = x + self.output(layer, attention)
        return x + self.mlp(layer, x)

    def output(self, layer: int, attention: Tensor) -> Tensor:
        return F.linear(attention, self._weights.layers[layer].output)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        w = self._weights.layers[layer]
        gate, up = F.linear(self._norm(x, w.mlp_norm), w.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w.down)

    def head(self, x: Tensor) -> Tensor:
        norm = _held(self._weights.final_norm, "head")
        matrix = _held(self._weights.head, "head")
        return F.linear(self._norm(x, norm), matrix).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm in float32, rounded once to the model dtype."""
        mean_square = x.square().mean(dim=-1, keepdim=True)
        scaled = x * torch.rsqrt(mean_square + self.shard.config.norm_eps)
        return (scaled * weight.float()).to(weight.dtype)


def _held(tensor: Tensor | None, part: str) -> Tensor:
    if tensor is None:
        raise InvalidValue("shard", part, f"this shard was cut without the {part}")
    return tensor
