"""KernelPrefillAttention: causal attention of chunks against brute force, token by token."""

from itertools import pairwise

import pytest
import torch

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.attention.reference import ReferenceAttention
from tknp.errors import InvalidValue
from tknp.kernels.prefill import KernelPrefillAttention

pytestmark = pytest.mark.usefixtures("kernels")

SMALL = AttentionShape(9, 3, 64, 64)
SHAPES = [AttentionShape(2, 1, 16, 48), SMALL, AttentionShape(16, 1, 80, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_brute_force(shape, requests_of) -> None:
    start, count = 70, 65
    requests = requests_of(shape, [start + count])
    requests.rows.append[0] = True
    table = requests.rows.block_tables[0]
    qkv = torch.randn(count, shape.qkv_width).to(torch.bfloat16)
    k, v = requests.pages()
    out = KernelPrefillAttention(shape, requests.rope).attend(qkv, start, table, k, v)

    lengths = torch.arange(start + 1, start + count + 1, dtype=torch.int32)
    appends = torch.ones(count, dtype=torch.bool)
    rows = DecodeRows(table.expand(count, -1), lengths - 1, lengths, appends)
    k2, v2 = requests.pages()
    expected, _ = ReferenceAttention(shape, requests.rope).attend(rows, qkv, k2, v2)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1.6e-2)
    for pool, expected_pool in ((k, k2), (v, v2)):
        assert torch.equal(pool.nan_to_num(7), expected_pool.nan_to_num(7))


def test_does_not_depend_on_chunks_or_threads(requests_of, threads) -> None:
    """1,100 tokens: more than one packed span of context."""
    count = 1100
    requests = requests_of(SMALL, [count])
    table = requests.rows.block_tables[0]
    prefill = KernelPrefillAttention(SMALL, requests.rope)
    qkv = torch.randn(count, SMALL.qkv_width).to(torch.bfloat16)
    threads(2)
    k, v = requests.pages()
    whole = prefill.attend(qkv, 0, table, k, v)
    assert whole.isfinite().all()
    threads(1)
    k2, v2 = requests.pages()
    cuts = [0, 100, 101, 640, count]
    parts = [prefill.attend(qkv[a:b], a, table, k2, v2) for a, b in pairwise(cuts)]
    assert torch.equal(whole, torch.cat(parts))
    assert torch.equal(k.nan_to_num(7), k2.nan_to_num(7))


def test_bounds(requests_of) -> None:
    requests = requests_of(SMALL, [70])
    table = requests.rows.block_tables[0]
    prefill = KernelPrefillAttention(SMALL, requests.rope)
    k, v = requests.pages()
    qkv = torch.zeros(2, SMALL.qkv_width, dtype=torch.bfloat16)
    assert prefill.attend(qkv[:0], 5, table, k, v).shape == (0, SMALL.q_width)
    with pytest.raises(InvalidValue, match="start=127"):
        prefill.attend(qkv, 127, table, k, v)
    for page in (-1, len(k)):
        table[1] = page
        with pytest.raises(InvalidValue, match="block_table"):
            prefill.attend(qkv, 64, table, k, v)
