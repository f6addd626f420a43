"""Every CPU backend against brute force, over pages where all that is not a row's own is poison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tknp.attention.base import DecodeAttention, DecodeRows
from tknp.attention.reference import ReferenceAttention
from tknp.attention.torch_cpu import TorchCpuAttention
from tknp.errors import InvalidValue

BACKENDS = [ReferenceAttention, TorchCpuAttention]
PAGE = 4
LENGTHS = [1, PAGE - 1, PAGE, PAGE + 1, 0, 5 * PAGE, 6 * PAGE + 2]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

Run = tuple[Tensor, Tensor, Tensor, Tensor]


def run(backend: DecodeAttention[Any], case: Any) -> Run:
    """Output, LSE, keys and values after one call on a copy of the pages."""
    k, v = case.pages()
    return *backend.attend(backend.plan(case.rows), case.qkv, k, v), k, v


def brute_force(case: Any) -> tuple[Tensor, Tensor]:
    """Attention by the definition, on complex numbers for the rotary, without any page logic."""
    shape, rows = case.shape, case.rows
    k, v = (x.double() for x in case.pages())
    half = shape.head_dim // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    heads = case.qkv.double().unflatten(1, (-1, shape.head_dim))
    pairs = torch.complex(heads[..., :half], heads[..., half:])
    angles = rows.positions.double()[:, None, None] * frequencies
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    rotated = torch.cat((turned.real, turned.imag), -1).to(case.qkv.dtype).double()
    out = torch.zeros(rows.rows, shape.q_heads, shape.head_dim, dtype=torch.float64)
    lse = torch.full((rows.rows, shape.q_heads), -torch.inf, dtype=torch.float64)
    for row, length in enumerate(rows.lengths.tolist()):
        if length == 0:
            continue
        pages = rows.block_tables[row, : -(-length // shape.page_size)].long()
        keys = k[pages].transpose(1, 2).flatten(0, 1)[:length]
        values = v[pages].transpose(1, 2).flatten(0, 1)[:length]
        if rows.append[row]:
            keys[-1] = rotated[row, shape.q_heads : -shape.kv_heads]
            values[-1] = heads[row, -shape.kv_heads :]
        keys, values = (x.repeat_interleave(shape.group, 1) for x in (keys, values))
        scores = torch.einsum("hd,thd->ht", rotated[row, : shape.q_heads], keys)
        scores /= shape.head_dim**0.5
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
        lse[row] = scores.logsumexp(-1)
    return out.flatten(1), lse


def check(backend: DecodeAttention[Any], case: Any) -> None:
    out, lse, *_ = run(backend, case)
    expected_out, expected_lse = brute_force(case)
    tolerance = TOLERANCE[case.qkv.dtype]
    assert out.dtype == case.qkv.dtype
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=BACKENDS, ids=lambda b: b.__name__)
def backend(request: pytest.FixtureRequest) -> Callable[[Any], DecodeAttention[Any]]:
    return lambda case: request.param(case.shape, case.rope)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("poison", [torch.nan, 6e4])
def test_lengths_around_page_ends(
    backend: Any, case: Any, dtype: torch.dtype, poison: float
) -> None:
    this = case(LENGTHS, dtype=dtype, poison=poison)
    check(backend(this), this)


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (3, 3), (1, 8), (2, 8)])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_shapes(
    backend: Any, case: Any, kv_heads: int, group: int, head_dim: int, dtype: torch.dtype
) -> None:
    this = case([9, 4, 0, 2], kv_heads=kv_heads, group=group, head_dim=head_dim, dtype=dtype)
    check(backend(this), this)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_page_sizes(backend: Any, case: Any, page_size: int) -> None:
    this = case([1, 15, 40], page_size=page_size)
    check(backend(this), this)


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_many_pages_in_runs_and_scattered(
    backend: Any, case: Any, dtype: torch.dtype, shuffled: bool
) -> None:
    this = case([40, 49, 100, 8, 0, 3], dtype=dtype, shuffled=shuffled)
    check(backend(this), this)


def test_rows_that_only_attend_to_their_shard(backend: Any, case: Any) -> None:
    this = case([5, 8, 3], append=[False, True, False], position_offset=100)
    check(backend(this), this)


def test_zero_rows(backend: Any, case: Any) -> None:
    this = case([])
    out, lse, *_ = run(backend(this), this)
    assert out.shape == (0, this.shape.q_width)
    assert lse.shape == (0, this.shape.q_heads)


def test_padding_rows_alone(backend: Any, case: Any) -> None:
    this = case([0, 0])
    out, lse, *_ = run(backend(this), this)
    assert not out.any()
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_an_append_writes_one_slot_and_nothing_else(backend: Any, case: Any) -> None:
    """Slot -1, the padding of other engines, would hit the last slot of the last page."""
    this = case([5, 0, 8, 4], append=[True, False, True, False], poison=7.0)
    before = this.pages()
    _, _, *after = run(backend(this), this)
    expected = {(int(this.rows.block_tables[0, 1]), 0), (int(this.rows.block_tables[2, 1]), 3)}
    for old, new in zip(before, after, strict=True):
        changed = (old[1:] != new[1:]).any(-1).any(1).nonzero()
        assert {(page + 1, slot) for page, slot in changed.tolist()} == expected
    values = this.qkv[0, -this.shape.kv_width :].view(this.shape.kv_heads, -1)
    assert torch.equal(after[1][this.rows.block_tables[0, 1], :, 0], values)


def test_table_entries_beyond_the_length_are_ignored(backend: Any, case: Any) -> None:
    this = case([9, 2])
    this.rows.block_tables[1, 1:] = 10**6
    check(backend(this), this)


def test_keys_are_stored_rotated(backend: Any, case: Any) -> None:
    """A key appended now and read next step is the key of its own position, not of the reader's."""
    this = case([3], group=1)
    _, _, k, _ = run(backend(this), this)
    position = int(this.rows.positions[0])
    half = this.shape.head_dim // 2
    key = this.qkv[0, this.shape.q_width :][: this.shape.head_dim]
    cos, sin = (x[position] for x in this.rope)
    expected = torch.cat((key[:half] * cos - key[half:] * sin, key[half:] * cos + key[:half] * sin))
    torch.testing.assert_close(k[this.rows.block_tables[0, 0], 0, 2], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_bitwise_the_same_in_any_batch_and_on_any_pages(
    case: Any, dtype: torch.dtype
) -> None:
    this = case([40, 49, 100, 8, 0, 3], dtype=dtype, head_dim=64, shuffled=False)
    other = case([40, 49, 100, 8, 0, 3], dtype=dtype, head_dim=64, shuffled=False)
    order = torch.randperm(this.storage.shape[2] - 1) + 1
    moved = torch.cat((torch.zeros(1, dtype=torch.int64), order))
    k, v = this.pages()
    other_k, other_v = torch.empty_like(k), torch.empty_like(v)
    other_k[moved], other_v[moved] = k, v
    attention = TorchCpuAttention(this.shape, this.rope)
    out, lse = attention.attend(attention.plan(this.rows), this.qkv, k, v)
    for row in range(this.rows.rows):
        alone = other.row(row)
        alone = DecodeRows(
            moved[alone.block_tables.long()].int(), alone.positions, alone.lengths, alone.append
        )
        qkv = this.qkv[row : row + 1]
        one = attention.attend(attention.plan(alone), qkv, other_k, other_v)
        assert torch.equal(one[0][0], out[row])
        assert torch.equal(one[1][0], lse[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_bit(case: Any, dtype: torch.dtype) -> None:
    this = case([70, 64, 33, 200, 5], dtype=dtype, page_size=16, head_dim=64)
    attention = TorchCpuAttention(this.shape, this.rope)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(attention, this)[:2])
    finally:
        torch.set_num_threads(threads)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"lengths": torch.tensor([9, 2], dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.tensor([-1, 2], dtype=torch.int32)}, "lengths"),
        ({"lengths": torch.tensor([0, 2], dtype=torch.int32)}, "lengths"),
        ({"positions": torch.tensor([0, 512], dtype=torch.int32)}, "positions"),
        ({"positions": torch.tensor([0], dtype=torch.int32)}, "positions"),
        ({"append": torch.tensor([True])}, "append"),
        ({"block_tables": torch.zeros(3, 2, dtype=torch.int32)}, "block_tables"),
    ],
)
def test_impossible_rows_are_refused(
    backend: Any, case: Any, change: dict[str, Tensor], field: str
) -> None:
    this = case([8, 2])
    rows = DecodeRows(**{**vars(this.rows), **change})
    with pytest.raises(InvalidValue, match=field):
        backend(this).plan(rows)


@pytest.mark.parametrize("page", [-1, 64])
def test_pages_outside_the_pool_are_refused(case: Any, page: int) -> None:
    this = case([8, 2])
    this.rows.block_tables[0, 0] = page
    with pytest.raises(InvalidValue, match="block_tables"):
        run(TorchCpuAttention(this.shape, this.rope), this)


def test_projections_that_do_not_fit_are_refused(backend: Any, case: Any) -> None:
    this = case([8, 2])
    attention = backend(this)
    plan = attention.plan(this.rows)
    k, v = this.pages()
    for qkv, keys, field in (
        (this.qkv[:, 1:], k, "qkv.shape"),
        (this.qkv[:1], k, "qkv.shape"),
        (this.qkv.half(), k, "k.dtype"),
        (this.qkv, k[:, :, 1:], "k.shape"),
    ):
        with pytest.raises(InvalidValue, match=field):
            attention.attend(plan, qkv, keys, v)
