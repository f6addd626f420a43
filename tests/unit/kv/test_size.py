from __future__ import annotations

import pytest

from tknp.errors import InvalidValue
from tknp.kv.size import page_bytes, pages_for, pages_in, token_bytes
from tknp.model.config import ModelConfig

SMOL = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192)
LLAMA_405B = ModelConfig(128256, 16384, 53248, 126, 128, 8, 128, 131072)


def test_bytes_of_a_token() -> None:
    assert token_bytes(SMOL, "bfloat16") == 23_040
    assert token_bytes(SMOL, "float32", tp=3) == 2 * 30 * 64 * 4
    assert token_bytes(SMOL, "bfloat16", layers=10) == 7_680


def test_replicated_heads_are_counted() -> None:
    per_rank = [token_bytes(LLAMA_405B, "bfloat16", tp) for tp in (1, 8, 16)]
    assert per_rank == [516_096, 64_512, 64_512]


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 64) == pages


def test_pages_are_whole() -> None:
    one = page_bytes(SMOL, "bfloat16", 1, 64)
    assert one == 64 * 23_040
    assert pages_in(5 * one - 1, SMOL, "bfloat16", 1, 64) == 4
    with pytest.raises(InvalidValue, match=f"budget_bytes={one}: two pages need {2 * one} bytes"):
        pages_in(one, SMOL, "bfloat16", 1, 64)
