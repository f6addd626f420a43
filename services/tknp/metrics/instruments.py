"""Counters and histograms for paths that every token or operation takes. Pure.

Plain numbers, half the cost of prometheus_client's own; `registry` turns them into its families
when somebody scrapes. Nothing is locked: one thread writes a series, any thread may read it and may
miss an observation under way.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate

from tknp.errors import TknpError

Labels = tuple[str, ...]


class Counter:
    """Sums by label values."""

    def __init__(self) -> None:
        self._sums: defaultdict[Labels, float] = defaultdict(float)

    def add(self, amount: float, *labels: str) -> None:
        self._sums[labels] += amount

    def values(self) -> dict[Labels, float]:
        return dict(self._sums)


class Histogram:
    """Observations of one series, counted by `bounds`: a bucket holds values up to its bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over: rows of one step have the same ITL."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def read(self) -> tuple[list[tuple[float, int]], float]:
        """(upper bound, observations up to it) in ascending order, the last infinite; the sum."""
        counts, total = accumulate(self._counts.copy()), self._sum
        return list(zip((*self._bounds, float("inf")), counts, strict=True)), total


def reason_of(error: BaseException) -> str:
    """The label value of an error: its gRPC status in lower case, of which there are few."""
    if isinstance(error, TknpError):
        return error.status.lower()
    return "cancelled" if isinstance(error, asyncio.CancelledError) else "internal"
