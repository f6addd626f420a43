"""csrc/simd_avx512.h, instruction by instruction as Intel documents them, against torch."""

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tknp.kernels.build import build, user_cache
from tknp.kernels.isa import Isa

LANES = 16
PAIR = 2 * LANES
TINY = torch.finfo(torch.float32).smallest_normal
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def probe(emulated_isa: Isa) -> ctypes.CDLL:
    """Functions of probe/probe.cpp."""
    sources = Path(__file__).parent / "probe"
    library = ctypes.CDLL(str(build(emulated_isa, user_cache() / "emulated", sources)))
    library.tknp_score.restype = ctypes.c_float
    library.tknp_sum.restype = library.tknp_largest.restype = ctypes.c_float
    return library


def flushed(x: Tensor) -> Tensor:
    return torch.where(x.abs() < TINY, torch.zeros_like(x).copysign(x), x)


def by_lanes(function: Callable[..., None], x: Tensor, out: Tensor) -> Tensor:
    """`function` of 16 lanes at a time."""
    for start in range(0, len(x), LANES):
        function(at(x[start:]), at(out[start:]))
    return out


def at(x: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def bf16(*values: float) -> Tensor:
    return torch.tensor(values).to(BF16)


def test_rounding_to_bfloat16(probe) -> None:
    words = torch.randint(-(2**31), 2**31, (8192,)).int()
    ties = (torch.arange(1024).int() << 16) * 63 + 0x8000  # between two values
    near = torch.cat([ties - 1, ties, ties + 1])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, TINY / 2, -TINY / 2, TINY])
    x = torch.cat([words.view(torch.float32), near.view(torch.float32), special, special])
    expected = flushed(x).to(BF16)
    found = by_lanes(probe.tknp_narrow, x, torch.empty(len(x), dtype=BF16))
    assert torch.equal(found.isnan(), x.isnan())
    numbers = ~x.isnan()
    assert torch.equal(found.view(torch.int16)[numbers], expected.view(torch.int16)[numbers])


def test_widening(probe) -> None:
    x = torch.arange(2**16).to(torch.int16).view(BF16)
    found = by_lanes(probe.tknp_widen, x, torch.empty(len(x)))
    assert torch.equal(found.view(torch.int32), x.view(torch.int16).int() << 16)


def test_exponential(probe) -> None:
    x = torch.cat([torch.linspace(-100, 100, 4000), torch.linspace(-1, 1, 3984)])
    x = torch.cat([x, torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0] * 4)])
    found = by_lanes(probe.tknp_exponential, x, torch.empty(len(x)))
    clamped = x.double().clamp(-87, 87)
    expected = clamped.exp()
    assert torch.equal(found.isnan(), x.isnan())
    error = ((found - expected) / expected).abs().nan_to_num(0)
    assert (error <= 4e-7 + 1e-7 * clamped.abs().nan_to_num(0)).all()


def test_sums(probe) -> None:
    x = torch.randint(-1000, 1000, (LANES, LANES)).float()
    each = torch.empty(LANES)
    probe.tknp_sum_each(at(x), at(each))
    assert torch.equal(each, x.sum(-1))
    assert [probe.tknp_sum(at(row)) for row in x] == each.tolist()
    assert [probe.tknp_largest(at(row)) for row in x] == x.amax(-1).tolist()


@pytest.mark.parametrize(
    ("total", "even", "odd", "expected"),
    [
        (1.0, (2.0, 3.0), (4.0, 5.0), 27.0),
        (2.0**24, (1.0, 1.0), (-(2.0**24), 1.0), 1.0),  # odd elements first
        (2.0**24, (1.0, 1.0), (1.0, 1.0), 2.0**24),  # rounded after each
        (0.0, (TINY / 2, 2.0**100), (0.0, 0.0), 0.0),  # a denormal operand
        (0.0, (TINY, 0.5), (0.0, 0.0), 0.0),  # a denormal result
        (TINY / 2, (0.0, 0.0), (0.0, 0.0), 0.0),
        (1.0, (torch.inf, 1.0), (torch.inf, -1.0), torch.nan),
        (1.0, (torch.nan, 0.0), (0.0, 0.0), torch.nan),
    ],
)
def test_multiply_add(probe, total, even, odd, expected) -> None:
    sums = torch.zeros(LANES)
    sums[5] = total
    elements = torch.zeros(PAIR, dtype=BF16)
    elements[10:12] = bf16(even[0], odd[0])
    pair = bf16(even[1], odd[1])
    probe.tknp_multiply_add(at(sums), at(elements), at(pair))
    wanted = torch.zeros(LANES)
    wanted[5] = expected
    torch.testing.assert_close(sums, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("half", [0, 1])
def test_scores_and_values_in_the_order_of_elements(probe, half) -> None:
    size = LANES if half else PAIR
    first, second, query = (torch.randint(-9, 9, (PAIR,)).to(BF16) for _ in range(3))
    weights = bf16(2.0, -3.0)
    expected = 2 * first.float() - 3 * second.float()
    for tokens in (first, second):
        tokens[size:] = torch.nan  # nothing of it is taken
    expected[size:] = 0
    score = probe.tknp_score(at(first), at(query), half)
    assert score == float((first[:size].float() * query[:size].float()).sum())
    out = torch.empty(PAIR)
    probe.tknp_weigh(at(first), at(second), at(weights), half, at(out))
    assert torch.equal(out, expected)
