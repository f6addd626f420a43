"""Counts, buckets and sums against brute force."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tknp.errors import CapacityError, InvalidValue, TknpError, Unavailable
from tknp.metrics.instruments import Counter, Histogram, reason_of

numbers = st.integers(0, 40)


@given(
    bounds=st.lists(numbers, min_size=1, max_size=6, unique=True).map(sorted),
    values=st.lists(st.tuples(numbers, st.integers(1, 4)), max_size=30),
)
def test_histogram(bounds: list[int], values: list[tuple[int, int]]) -> None:
    histogram = Histogram(bounds)
    for value, times in values:
        histogram.observe(value, times)
    every = [value for value, times in values for _ in range(times)]
    buckets, total = histogram.read()
    assert total == sum(every)
    assert buckets == [(b, sum(value <= b for value in every)) for b in [*bounds, float("inf")]]
    assert buckets[-1][1] == len(every)
    assert all(a <= b for (_, a), (_, b) in pairwise(buckets))


def test_a_value_belongs_to_the_bucket_that_it_bounds() -> None:
    histogram = Histogram((0.05, 0.1))
    histogram.observe(0.05)
    assert histogram.read()[0] == [(0.05, 1), (0.1, 1), (float("inf"), 1)]


def test_counter() -> None:
    counter = Counter()
    counter.add(2, "a", "x")
    counter.add(0.5, "a", "x")
    counter.add(1, "b", "x")
    assert counter.values() == {("a", "x"): 2.5, ("b", "x"): 1}


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InvalidValue("prompt", "", "be there"), "invalid_argument"),
        (CapacityError("full"), "resource_exhausted"),
        (Unavailable("loading"), "unavailable"),
        (TknpError("odd"), "internal"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyError("bug"), "internal"),
    ],
)
def test_reasons(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason
