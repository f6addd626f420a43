"""Whether the client itself was what limited a run.

A client that sends late, or is too busy to look at its sockets, reports its own delays as the
server's. Such a run is invalid, and says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tknp_loadgen.exact import Floats

LAG_MS = 5.0
LAG_OF_TTFT = 0.01
RATE_ERROR = 0.01
CPU_RATIO = 0.95


def lag_limit_ms(ttft_p50_ms: float | None) -> float:
    """p99 lag above this invalidates: 5 ms, or 1% of the median TTFT if that is more."""
    if ttft_p50_ms is None or math.isinf(ttft_p50_ms):
        return LAG_MS
    return max(LAG_MS, LAG_OF_TTFT * ttft_p50_ms)


def rate_error(scheduled_s: Floats, lag_s: Floats) -> float | None:
    """How much the span of releases differs from the schedule's, relative to it.

    `lag_s` leaves out waiting that was asked for (--max-concurrency). None: no span to compare.
    """
    if len(scheduled_s) < 2:
        return None
    span = float(scheduled_s.max() - scheduled_s.min())
    if span <= 0:
        return None
    first, last = int(np.argmin(scheduled_s)), int(np.argmax(scheduled_s))
    return abs(float(lag_s[last] - lag_s[first])) / span


def burst_spread_s(scheduled_s: Floats, released_s: Floats) -> float | None:
    """Longest time between the first and last release of requests due at the same moment."""
    moments, group, sizes = np.unique(scheduled_s, return_inverse=True, return_counts=True)
    if not len(moments) or sizes.max() < 2:
        return None
    first, last = np.full(len(moments), np.inf), np.full(len(moments), -np.inf)
    np.minimum.at(first, group, released_s)
    np.maximum.at(last, group, released_s)
    return float((last - first)[sizes > 1].max())


def reasons(
    lag_p99_ms: float | None,
    ttft_p50_ms: float | None,
    rate: float | None,
    span_s: float,
    workers: Sequence[Mapping[str, Any]],
    max_lag_ms: float | None = None,
) -> list[str]:
    """Why a run is invalid; empty: it is valid. `max_lag_ms` replaces the usual limit.

    `rate` is the error over a schedule of `span_s`; below the limit of lag it means nothing.
    """
    limit = lag_limit_ms(ttft_p50_ms) if max_lag_ms is None else max_lag_ms
    found = []
    if lag_p99_ms is not None and lag_p99_ms > limit:
        found.append(f"requests left {lag_p99_ms:.1f} ms late at p99, more than {limit:.1f} ms")
    if rate is not None and rate > RATE_ERROR and rate * span_s * 1e3 > limit:
        found.append(f"the rate sent differs by {rate:.1%} from the schedule's")
    for worker in workers:
        if worker["loop_lag_p99_ms"] > limit:
            found.append(f"worker {worker['worker']} looked at its sockets "
                         f"{worker['loop_lag_p99_ms']:.1f} ms late at p99")  # fmt: skip
        if worker["cpu_ratio"] > CPU_RATIO and worker["wall_s"] > 1:
            found.append(f"worker {worker['worker']} used {worker['cpu_ratio']:.0%} of its core: "
                         "use more --processes")  # fmt: skip
    return found
