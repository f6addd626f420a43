"""The dense half of the network: everything but attention, on one shard.

    x = embed(ids)
    for each layer:   qkv = project(layer, x);   attention;   x = finish(layer, x, attention)
    logits = head(x)

The residual stream x is float32 [B, D] in every dtype; weights and matrix products are in the
model dtype. On one of several dense ranks `output` and `mlp` return partial sums, `embed` the rows
of a vocabulary slice and `head` a slice of the logits: the caller reduces or concatenates.
B may be 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tknp.errors import InvalidValue
from tknp.model.shard import Shard
from tknp.model.weights import ShardWeights


class Dense(Protocol):
    """Dense operations of one rank; V_t is its vocabulary slice.

    W, what it projects of a QKV row, is `Shard.projected_width`; A, what it reads of an attention
    row, the length of `Shard.output_columns`.
    """

    def embed(self, ids: Tensor) -> Tensor:
        """int64 [B] -> float32 [B, D]; zero for ids outside this rank's vocabulary slice."""

    def project(self, layer: int, x: Tensor) -> Tensor:
        """Norm and QKV projection: float32 [B, D] -> [B, W], rows q | k | v before RoPE."""

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        """Output projection and MLP with both residuals, one dense rank only; may reuse x."""

    def output(self, layer: int, attention: Tensor) -> Tensor:
        """Partial output projection: [B, A] -> [B, D], to be summed over the dense ranks."""

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        """Norm and partial MLP: float32 [B, D] -> [B, D], to be summed likewise."""

    def head(self, x: Tensor) -> Tensor:
        """Final norm and LM head: float32 [B, D] -> float32 logits [B, V_t]."""

    def head_parts(self, x: Tensor) -> Iterator[Tensor]:
        """The same logits from left to right, each part computed when it is asked for."""


class TorchDense:
    """Dense in plain torch, on any device; the reference for every faster implementation."""

    def __init__(self, weights: ShardWeights) -> None:
        self._weights = weights
        self.shard = weights.shard

    def embed(self, ids: Tensor) -> Tensor:
        table = held(self._weights.embedding, "embedding")
        if len(table) == 0:  # the last ranks of a small vocabulary
            return torch.zeros(len(ids), table.shape[1], device=table.device)
        local = ids - self.shard.vocab.start
        mine = (local >= 0) & (local < len(table))
        rows = F.embedding(local.clamp(0, len(table) - 1), table).float()
        return rows.masked_fill(~mine[:, None], 0.0)

    def project(self, layer: int, x: Tensor) -> Tensor:
        w = self._weights.layers[layer]
        return F.linear(self._norm(x, w.input_norm, w.input_norm_bias), w.qkv)

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        check_whole(self.shard)
        x = x + self.output(layer, attention)
        return x + self.mlp(layer, x)

    def output(self, layer: int, attention: Tensor) -> Tensor:
        return F.linear(attention, self._weights.layers[layer].output)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        w = self._weights.layers[layer]
        inner = F.linear(self._norm(x, w.mlp_norm, w.mlp_norm_bias), w.gate_up)
        if not self.shard.config.gated:
            return F.linear(F.relu(inner).square(), w.down)
        gate, up = inner.chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w.down)

    def head(self, x: Tensor) -> Tensor:
        norm = held(self._weights.final_norm, "head")
        matrix = held(self._weights.head, "head")
        return F.linear(self._norm(x, norm, self._weights.final_norm_bias), matrix).float()

    def head_parts(self, x: Tensor) -> Iterator[Tensor]:
        yield self.head(x)

    def _norm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """RMSNorm, or with a bias LayerNorm of scale 1 + weight; float32, rounded once."""
        eps = self.shard.config.norm_eps
        if bias is not None:
            normed = F.layer_norm(x, weight.shape, weight.float() + 1, bias.float(), eps)
            return normed.to(weight.dtype)
        mean_square = x.square().mean(dim=-1, keepdim=True)
        return (x * torch.rsqrt(mean_square + eps) * weight.float()).to(weight.dtype)


class BlocksDense:
    """Dense of a rank that holds several layer blocks, one `Dense` each (copies 2)."""

    def __init__(self, shards: Sequence[Shard], parts: Sequence[Dense]) -> None:
        self.parts = tuple(parts)
        self._by_layer: dict[int, Dense] = {}
        self._embedding: Dense | None = None
        self._head: Dense | None = None
        for shard, part in zip(shards, parts, strict=True):
            twice = self._by_layer.keys() & set(shard.layers)
            if twice:
                raise InvalidValue("shards", sorted(twice), "a rank holds a layer once")
            self._by_layer |= dict.fromkeys(shard.layers, part)
            if shard.embedding:
                self._embedding = part
            if shard.head:
                self._head = part

    def embed(self, ids: Tensor) -> Tensor:
        return held(self._embedding, "embedding").embed(ids)

    def project(self, layer: int, x: Tensor) -> Tensor:
        return self._of(layer).project(layer, x)

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        return self._of(layer).finish(layer, x, attention)

    def output(self, layer: int, attention: Tensor) -> Tensor:
        return self._of(layer).output(layer, attention)

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        return self._of(layer).mlp(layer, x)

    def head(self, x: Tensor) -> Tensor:
        return held(self._head, "head").head(x)

    def head_parts(self, x: Tensor) -> Iterator[Tensor]:
        return held(self._head, "head").head_parts(x)

    def _of(self, layer: int) -> Dense:
        return held(self._by_layer.get(layer), f"layer {layer}")


def check_whole(shard: Shard) -> None:
    """InvalidValue unless one rank does all dense work: `finish` has no sum in its middle."""
    if shard.dense_tp > 1:
        remedy = "sum output() and mlp() over the ranks that share the dense work"
        raise InvalidValue("dense_tp", shard.dense_tp, remedy)


Held = TypeVar("Held")


def held(part: Held | None, name: str) -> Held:
    """`part`, or InvalidValue if this rank's shard was cut without it."""
    if part is None:
        raise InvalidValue("shard", name, f"this rank was loaded without the {name}")
    return part
