"""Percentiles as observed values, failures included.

The p-th percentile is the smallest observed value that at least p of the observations don't exceed
(NumPy's `inverted_cdf`), with failures as +inf. So p95 <= bound exactly where 95% keep the bound,
and a server that drops its slowest requests gains nothing. Interpolating between values would give
latencies that nobody saw, and NaN beside +inf.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tknp_loadgen.exact import Floats, Integers

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
_Z95 = 1.959963984540054
EXACT_MICROSECONDS = 1 << 22  # gaps below are counted one by one microsecond


def needed_samples(quantile: float) -> int:
    """Fewest samples that bound a quantile from both sides with 95% confidence."""
    return math.ceil(math.log(0.025) / math.log(max(quantile, 1 - quantile)) - 1e-9)


def rank(quantile: float, count: int) -> int:
    """Index of the quantile among `count` sorted values."""
    return max(0, math.ceil(quantile * count - 1e-9) - 1)


def distribution(values: Floats, failures: int = 0) -> dict[str, Any]:
    """Statistics of completed values and `failures` of +inf. None where there is nothing.

    `mean` and `completed_max` are of the completed ones. `p95_ci` bounds p95 with 95% confidence;
    its upper end is +inf where the sample is too small to bound it.
    """
    ordered = np.sort(values)
    count = len(ordered) + failures
    result: dict[str, Any] = {"mean": float(ordered.mean()) if len(ordered) else None}

    def at(index: int) -> float | None:
        if not count:
            return None
        return float(ordered[index]) if index < len(ordered) else math.inf

    result |= {name: at(rank(quantile, count)) for name, quantile in QUANTILES.items()}
    result["max"] = at(count - 1)
    result["completed_max"] = float(ordered[-1]) if len(ordered) else None
    spread = _Z95 * math.sqrt(count * 0.95 * 0.05)
    low, high = math.floor(count * 0.95 - spread), math.ceil(count * 0.95 + spread)
    upper = at(high) if high < count else (math.inf if count else None)
    result["p95_ci"] = [at(max(0, low - 1)), upper]
    return result | {"count": count, "failures": failures}


def wilson(good: int, total: int) -> tuple[float, float]:
    """95% interval of a share (Wilson); (0, 1) of nothing."""
    if not total:
        return 0.0, 1.0
    share, square = good / total, _Z95 * _Z95
    middle = (share + square / (2 * total)) / (1 + square / total)
    half = _Z95 * math.sqrt(share * (1 - share) / total + square / (4 * total * total))
    half /= 1 + square / total
    low = 0.0 if not good else max(0.0, middle - half)
    return low, 1.0 if good == total else min(1.0, middle + half)


class GapCounts:
    """Any number of gaps in little memory: counted by the microsecond, longer ones kept."""

    def __init__(self) -> None:
        self._counts = np.zeros(EXACT_MICROSECONDS)
        self._long: list[tuple[Floats, Floats]] = []
        self._sum_us = self._weight = 0.0
        self._max_us = 0.0

    def add(self, gaps_us: Floats, weights: Floats) -> None:
        """`weights`: how many tokens each gap stands for."""
        if not len(gaps_us):
            return
        whole = np.rint(gaps_us).astype(np.int64)
        short = whole < EXACT_MICROSECONDS
        counted = np.bincount(whole[short], weights[short])
        self._counts[: len(counted)] += counted
        if not short.all():
            self._long.append((gaps_us[~short], weights[~short]))
        self._sum_us += float((gaps_us * weights).sum())
        self._weight += float(weights.sum())
        self._max_us = max(self._max_us, float(gaps_us.max()))

    def merged(self) -> tuple[Floats, Floats]:
        """Distinct gaps in microseconds, ascending, and the weight of each."""
        at: Integers = np.flatnonzero(self._counts)
        gaps, weights = at.astype(np.float64), self._counts[at]
        if self._long:
            longer = np.concatenate([gap for gap, _ in self._long])
            heavier = np.concatenate([weight for _, weight in self._long])
            order = np.argsort(longer, kind="stable")
            gaps = np.concatenate([gaps, longer[order]])
            weights = np.concatenate([weights, heavier[order]])
        return gaps, weights

    def distribution_ms(self) -> Mapping[str, Any]:
        if not self._weight:
            return {"mean": None, **dict.fromkeys(QUANTILES), "max": None, "count": 0}
        gaps, weights = self.merged()
        reached = np.cumsum(weights)
        result: dict[str, Any] = {"mean": self._sum_us / self._weight / 1e3}
        for name, quantile in QUANTILES.items():
            index = np.searchsorted(reached, quantile * reached[-1] * (1 - 1e-12))
            result[name] = float(gaps[min(int(index), len(gaps) - 1)]) / 1e3
        return result | {"max": self._max_us / 1e3, "count": round(self._weight)}
