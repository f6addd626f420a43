"""Which implementation of the mathematics a rank runs.

bfloat16 on a CPU runs the compiled kernels (`tknp.kernels`); everything else, and every machine
that can't have them, runs torch. Both give the same network; `name` says which, in logs and status.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeAttention, RopeTable
from tknp.attention.factory import decode_attention
from tknp.attention.prefill import PrefillAttention
from tknp.errors import InvalidValue
from tknp.kernels.cores import keep_cores
from tknp.kernels.decode import KernelDecodeAttention, check_rope
from tknp.kernels.dense import KernelDense, check_family
from tknp.kernels.exchange import Mailbox
from tknp.kernels.layers import KernelLayers
from tknp.kernels.library import available
from tknp.kernels.prefill import KernelPrefillAttention, KernelPrefillLayers
from tknp.model.dense import BlocksDense, Dense, TorchDense
from tknp.model.rope import rope_table
from tknp.model.shard import Shard
from tknp.model.weights import ShardWeights
from tknp.transport.base import Transport

log = logging.getLogger(__name__)


class ChunkAttention(Protocol):
    """What prefill needs, see `tknp.attention.prefill.PrefillAttention`."""

    def attend(
        self, qkv: Tensor, start: int, block_table: Tensor, k: Tensor, v: Tensor
    ) -> Tensor: ...


@dataclass(frozen=True)
class Backend:
    """Torch on any device and in any dtype."""

    shape: AttentionShape
    rope: RopeTable
    name: str = "torch"

    def dense(self, weights: ShardWeights) -> Dense:
        return TorchDense(weights)

    def decode_attention(self) -> DecodeAttention[Any]:
        return decode_attention(self.shape, self.rope)

    def prefill_attention(self) -> ChunkAttention:
        return PrefillAttention(self.shape, self.rope)

    def keep_cores(self) -> tuple[int, ...]:
        """Keep the threads that compute for the calling one in place, see `tknp.kernels.cores`.

        For ranks with a process of their own. Returns their cores; empty if they are left alone.
        """
        return ()


class KernelBackend(Backend):
    """The compiled CPU kernels, bfloat16."""

    def dense(self, weights: ShardWeights) -> Dense:
        return KernelDense(weights)

    def decode_attention(self) -> DecodeAttention[Any]:
        return KernelDecodeAttention(self.shape, self.rope)

    def prefill_attention(self) -> ChunkAttention:
        return KernelPrefillAttention(self.shape, self.rope)

    def keep_cores(self) -> tuple[int, ...]:
        return keep_cores()


class KernelAttentionBackend(KernelBackend):
    """The compiled kernels for attention; torch for dense work that they don't have."""

    def dense(self, weights: ShardWeights) -> Dense:
        return TorchDense(weights)


def choose_backend(
    shard: Shard, *, page_size: int, max_positions: int, dtype: torch.dtype, device: torch.device
) -> Backend:
    """The fastest backend for one rank's heads; says why when a CPU can't have the kernels.

    `max_positions`: tokens that the rotary tables cover. Builds the kernels on first use, which
    takes most of a minute.
    """
    shape = AttentionShape.of(shard, page_size)
    cos, sin = rope_table(shard.config, torch.arange(max_positions))
    rope = cos.to(device), sin.to(device)
    if device.type != "cpu" or dtype != torch.bfloat16:
        return Backend(shape, rope)
    found = available()
    if not found:
        log.warning("bfloat16 runs on torch, which is slow on CPUs: %s", found.reason)
        return Backend(shape, rope)
    name = f"kernels ({found.isa})"
    try:
        rope = check_rope(shape, rope)
        check_family(shard.config)
    except InvalidValue as error:
        if error.field == "family":
            log.warning("dense work runs on torch, which is slow in bfloat16: %s", error)
            return KernelAttentionBackend(shape, rope, f"{name} for attention, torch for the rest")
        log.warning("bfloat16 runs on torch, which is slow on CPUs: %s", error)
        return Backend(shape, rope)
    return KernelBackend(shape, rope, name)


def whole_layers(
    heads: Shard,
    dense: Dense | None,
    attention: DecodeAttention[Any] | None,
    pages: Mapping[int, tuple[Tensor, Tensor]] | None,
    *,
    max_rows: int,
    transport: Transport,
    stream: int,
) -> KernelLayers | None:
    """What runs whole layers in one go, where there is a faster way than operation by operation."""
    blocks = dense.parts if isinstance(dense, BlocksDense) else (dense,)
    held = [b for b in blocks if isinstance(b, KernelDense) and b.shard.dense_tp == 1]
    attends = attention if isinstance(attention, KernelDecodeAttention) else None
    if not held and attends is None:
        return None
    mailbox = Mailbox.of(transport, stream)
    return KernelLayers(heads, held, attends, pages or {}, max_rows=max_rows, mailbox=mailbox)


def whole_chunk_layers(
    dense: Dense, attention: ChunkAttention, pages: Mapping[int, tuple[Tensor, Tensor]]
) -> KernelPrefillLayers | None:
    """The same of a prompt's chunk."""
    if not (isinstance(dense, KernelDense) and isinstance(attention, KernelPrefillAttention)):
        return None
    if dense.shard.dense_tp > 1:
        return None
    return KernelPrefillLayers(dense, attention, pages)
