"""Attention over pages against transformers' rotary embedding and torch's public SDPA."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.attention.prefill import PrefillAttention
from tknp.attention.torch_cpu import TorchCpuAttention
from tknp.kv.storage import KvStorage
from tknp.model.config import ModelConfig
from tknp.model.rope import rope_table

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
PAGE_SIZE, PAGES = 64, 12
SHAPES = [(9, 3, 64), (8, 1, 128), (4, 4, 80)]


def sdpa(qkv: Tensor, q_heads: int, kv_heads: int, head_dim: int) -> Tensor:
    """Causal attention of one whole sequence, rows [q | k | v] -> [n, Hq dh]."""
    config = LlamaConfig(
        hidden_size=q_heads * head_dim,
        num_attention_heads=q_heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
    )
    heads = qkv.view(1, qkv.shape[0], -1, head_dim).transpose(1, 2)
    q, k, v = heads.split((q_heads, kv_heads, kv_heads), dim=1)
    positions = torch.arange(qkv.shape[0])[None]
    cos, sin = LlamaRotaryEmbedding(config)(qkv.float(), positions)
    q, k = (x.to(qkv.dtype) for x in apply_rotary_pos_emb(q.float(), k.float(), cos, sin))
    out = scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(2)[0]


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_prefill_in_chunks_and_then_decode(
    dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int
) -> None:
    prompt, total = 300, 330
    config = ModelConfig(10, q_heads * head_dim, 8, 1, q_heads, kv_heads, head_dim, 2048)
    rope = rope_table(config, torch.arange(config.max_position))
    shape = AttentionShape(q_heads, kv_heads, head_dim, PAGE_SIZE)
    random = torch.Generator().manual_seed(0)
    qkv = torch.randn(total, shape.qkv_width, generator=random).to(dtype)
    expected = sdpa(qkv, q_heads, kv_heads, head_dim)

    k, v = KvStorage(1, PAGES, kv_heads, PAGE_SIZE, head_dim, dtype).layer(0)
    k.fill_(torch.nan)
    v.fill_(torch.nan)
    table = (torch.randperm(PAGES - 1, generator=random) + 1)[:6].int()
    prefill, decode = PrefillAttention(shape, rope), TorchCpuAttention(shape, rope)
    outs = [
        prefill.attend(qkv[start:stop], start, table, k, v)
        for start, stop in ((0, 128), (128, 199), (199, prompt))
    ]
    for position in range(prompt, total):
        rows = DecodeRows(
            block_tables=table[None],
            positions=torch.tensor([position], dtype=torch.int32),
            lengths=torch.tensor([position + 1], dtype=torch.int32),
            append=torch.tensor([True]),
        )
        outs.append(decode.attend(decode.plan(rows), qkv[position : position + 1], k, v)[0])
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(torch.cat(outs).float(), expected, rtol=tolerance, atol=tolerance)
