"""Prefill against decode token by token, which brute force has judged already."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from tknp.attention import prefill
from tknp.attention.base import DecodeRows
from tknp.attention.prefill import PrefillAttention
from tknp.attention.reference import ReferenceAttention
from tknp.errors import InvalidValue

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def token_by_token(case: Any, qkv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    attention = ReferenceAttention(case.shape, case.rope)
    outs = []
    for position in range(qkv.shape[0]):
        rows = DecodeRows(
            block_tables=case.rows.block_tables,
            positions=torch.tensor([position], dtype=torch.int32),
            lengths=torch.tensor([position + 1], dtype=torch.int32),
            append=torch.tensor([True]),
        )
        one = qkv[position : position + 1]
        outs.append(attention.attend(attention.plan(rows), one, k, v)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("cuts", [[], [1], [8], [3, 4, 17], [16, 20]])
def test_chunks_equal_decode(
    case: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, cuts: list[int]
) -> None:
    tokens = 22
    monkeypatch.setattr(prefill, "BLOCK_TOKENS", 8)
    this = case([tokens], dtype=dtype, group=3)
    this.storage.data.fill_(torch.nan)
    random = torch.Generator().manual_seed(1)
    qkv = torch.randn(tokens, this.shape.qkv_width, generator=random).to(dtype)
    k, v = this.pages()
    expected_k, expected_v = this.pages()
    attention = PrefillAttention(this.shape, this.rope)
    edges = [0, *cuts, tokens]
    outs = [
        attention.attend(qkv[a:b], a, this.rows.block_tables[0], k, v) for a, b in pairwise(edges)
    ]
    expected = token_by_token(this, qkv, expected_k, expected_v)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(torch.cat(outs), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(k, expected_k, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(v, expected_v, rtol=0, atol=0, equal_nan=True)


def test_an_empty_chunk(case: Any) -> None:
    this = case([4])
    k, v = this.pages()
    attention = PrefillAttention(this.shape, this.rope)
    out = attention.attend(this.qkv[:0], 4, this.rows.block_tables[0], k, v)
    assert out.shape == (0, this.shape.q_width)


@pytest.mark.parametrize("start", [-1, 4, 1000])
def test_a_chunk_that_leaves_its_pages_is_refused(case: Any, start: int) -> None:
    this = case([4])
    k, v = this.pages()
    attention = PrefillAttention(this.shape, this.rope)
    with pytest.raises(InvalidValue, match=f"start={start}: 1 tokens from there must end by 4"):
        attention.attend(this.qkv, start, this.rows.block_tables[0], k, v)
