from __future__ import annotations

import pytest
import torch

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.attention.factory import decode_attention
from tknp.attention.flash import flash_with_lse
from tknp.attention.reference import ReferenceAttention
from tknp.attention.torch_cpu import TorchCpuAttention
from tknp.attention.torch_cuda import TorchCudaAttention
from tknp.errors import InvalidValue
from tknp.model.config import ModelConfig
from tknp.model.shard import Shard

SHAPE = AttentionShape(4, 2, 8, 64)
ROPE = (torch.ones(16, 4), torch.zeros(16, 4))


def test_the_shape_of_a_shard() -> None:
    config = ModelConfig(100, 64, 64, 5, 8, 2, 8, 512)
    whole, shared = (AttentionShape.of(Shard(config, 0, 1, True, True, tp), 64) for tp in (1, 4))
    assert (whole.q_heads, whole.kv_heads, whole.group) == (8, 2, 4)
    assert (shared.q_heads, shared.kv_heads, shared.qkv_width) == (2, 1, 32)


def test_uneven_groups_are_refused() -> None:
    with pytest.raises(InvalidValue, match="q_heads=5: must be a multiple of kv_heads=2"):
        AttentionShape(5, 2, 8, 64)


def test_the_factory_chooses_by_device() -> None:
    assert isinstance(decode_attention(SHAPE, ROPE), TorchCpuAttention)
    assert isinstance(decode_attention(SHAPE, ROPE, backend="torch"), TorchCpuAttention)
    assert isinstance(decode_attention(SHAPE, ROPE, backend="reference"), ReferenceAttention)


def test_the_factory_names_what_it_cannot_serve() -> None:
    with pytest.raises(InvalidValue, match="backend='fast': choose one of auto"):
        decode_attention(SHAPE, ROPE, backend="fast")
    elsewhere = (ROPE[0].to("meta"), ROPE[1].to("meta"))
    with pytest.raises(InvalidValue, match="device='meta': decode attention runs on cpu and cuda"):
        decode_attention(SHAPE, elsewhere)


def test_cuda_refuses_pages_that_its_kernel_cannot_read() -> None:
    with pytest.raises(InvalidValue, match="page_size=64: torch's paged kernel needs a multiple"):
        TorchCudaAttention(SHAPE, ROPE)


def test_cuda_glue_agrees_with_the_kernel_on_shapes() -> None:
    """Without a GPU the meta device runs everything but the arithmetic."""
    shape = AttentionShape(8, 2, 64, 256)
    with torch.device("meta"):
        lengths = torch.empty(6, dtype=torch.int32)
        rows = DecodeRows(torch.empty(6, 4, dtype=torch.int32), lengths, lengths, lengths > 0)
        attention = TorchCudaAttention(shape, (torch.empty(512, 32), torch.empty(512, 32)))
        k, v = torch.empty(2, 9, 2, 256, 64, dtype=torch.bfloat16)
        qkv = torch.empty(6, shape.qkv_width, dtype=torch.bfloat16)
        out, lse = attention.attend(attention.plan(rows), qkv, k, v)
    assert (out.shape, out.dtype) == ((6, shape.q_width), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((6, shape.q_heads), torch.float32)


def test_the_flash_kernel_is_never_asked_for_nothing() -> None:
    """torch's CPU kernel would divide by zero and kill the process."""
    q, nothing = torch.ones(1, 1, 1, 8), torch.ones(1, 1, 0, 8)
    with pytest.raises(InvalidValue, match="at least one token"):
        flash_with_lse(q, nothing, nothing, 1.0)


def test_causal_flash_needs_a_square() -> None:
    q, k = torch.ones(1, 1, 2, 8), torch.ones(1, 1, 3, 8)
    with pytest.raises(InvalidValue, match="causal needs 3 tokens"):
        flash_with_lse(q, k, k, 1.0, causal=True)
