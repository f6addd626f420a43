"""The CUDA backend against brute force; runs only where there is a CUDA device."""

from __future__ import annotations

import pytest
import torch

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.attention.factory import decode_attention
from tknp.attention.prefill import PrefillAttention
from tknp.attention.reference import ReferenceAttention
from tknp.kv.storage import KvStorage
from tknp.model.config import ModelConfig
from tknp.model.rope import rope_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PAGE_SIZE, PAGES = 256, 24
DTYPES = [torch.bfloat16, torch.float16]


def setup(dtype: torch.dtype, group: int) -> tuple[AttentionShape, ModelConfig, KvStorage]:
    shape = AttentionShape(2 * group, 2, 128, PAGE_SIZE)
    config = ModelConfig(10, 256 * group, 8, 1, 2 * group, 2, 128, 2048)
    storage = KvStorage(1, PAGES, 2, PAGE_SIZE, 128, dtype, "cuda")
    storage.data.normal_()
    return shape, config, storage


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_decode(dtype: torch.dtype, group: int) -> None:
    torch.manual_seed(0)
    shape, config, storage = setup(dtype, group)
    rope = rope_table(config, torch.arange(config.max_position, device="cuda"))
    lengths = torch.tensor([1, 255, 256, 257, 0, 1000], dtype=torch.int32)
    tables = torch.zeros(6, 4, dtype=torch.int32)
    tables[:, :] = (torch.randperm(PAGES - 1)[:20] + 1).view(5, 4).int()[[0, 1, 2, 3, 3, 4]]
    rows = DecodeRows(tables, (lengths - 1).clamp(min=0), lengths, lengths > 0)
    qkv = torch.randn(6, shape.qkv_width).to(dtype)
    k, v = (x.cpu() for x in storage.layer(0))
    reference = ReferenceAttention(shape, (rope[0].cpu(), rope[1].cpu()))
    expected = reference.attend(reference.plan(rows), qkv, k, v)

    on_device = DecodeRows(*(x.cuda() for x in vars(rows).values()))
    attention = decode_attention(shape, rope)
    out, lse = attention.attend(attention.plan(on_device), qkv.cuda(), *storage.layer(0))
    torch.testing.assert_close(out.cpu(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(storage.layer(0)[0][1:].cpu(), k[1:], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shape, config, storage = setup(dtype, 4)
    rope = rope_table(config, torch.arange(config.max_position, device="cuda"))
    qkv = torch.randn(700, shape.qkv_width).to(dtype)
    table = torch.tensor([5, 2, 9], dtype=torch.int32)
    host = KvStorage(1, PAGES, 2, PAGE_SIZE, 128, dtype)
    expected = PrefillAttention(shape, (rope[0].cpu(), rope[1].cpu())).attend(
        qkv, 0, table, *host.layer(0)
    )
    attention = PrefillAttention(shape, rope)
    outs = [
        attention.attend(qkv[a:b].cuda(), a, table.cuda(), *storage.layer(0))
        for a, b in ((0, 300), (300, 700))
    ]
    torch.testing.assert_close(torch.cat(outs).cpu(), expected, rtol=2e-2, atol=2e-2)
