"""Which decode attention serves a device."""

from __future__ import annotations

from typing import Any

import torch

from tknp.attention.base import AttentionShape, DecodeAttention, RopeTable
from tknp.attention.reference import ReferenceAttention
from tknp.attention.torch_cpu import TorchCpuAttention
from tknp.errors import InvalidValue

BACKENDS = ("auto", "torch", "reference")


def decode_attention(
    shape: AttentionShape, rope: RopeTable, *, backend: str = "auto"
) -> DecodeAttention[Any]:
    """The decode attention of the device that `rope`'s tables are on.

    backend  auto: the fastest here for the device; torch: torch's kernels; reference: brute force
    """
    device = rope[0].device
    if backend not in BACKENDS:
        raise InvalidValue("backend", backend, f"choose one of {', '.join(BACKENDS)}")
    if backend == "reference":
        return ReferenceAttention(shape, rope)
    if device.type == "cpu":
        return TorchCpuAttention(shape, rope)
    if device.type == "cuda" and torch.cuda.is_available():
        from tknp.attention.torch_cuda import TorchCudaAttention

        return TorchCudaAttention(shape, rope)
    raise InvalidValue("device", str(device), "decode attention runs on cpu and cuda devices")
