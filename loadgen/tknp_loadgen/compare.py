"""Runs of one trace side by side: request by request, with bootstrap intervals.

Two runs of one trace differ only in the server, so each request is compared with itself. That takes
the spread between requests out of the difference. Runs of different traces are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tknp_loadgen.errors import InputError
from tknp_loadgen.exact import Draws, Floats
from tknp_loadgen.measure.columns import Columns
from tknp_loadgen.measure.result import Result
from tknp_loadgen.measure.summary import first_tokens_of, good_requests

RESAMPLES = 2000
STREAM = 30
METRICS = ("ttft_ms", "tpot_ms", "completion_s", "normalized_latency_ms_per_token")


def compare(results: Sequence[Result]) -> dict[str, Any]:
    """The first run against each other one. Raises InputError for runs that can't be compared."""
    if len(results) < 2:
        raise InputError("runs", len(results), "name two result directories or more")
    base, *others = results
    for other in others:
        if other.trace.sha256 != base.trace.sha256:
            raise InputError(
                "trace", f"{other.trace.sha256[:12]} of {other.name}",
                f"{base.name} ran {base.trace.sha256[:12]}: only runs of one trace are comparable",
            )  # fmt: skip
    return {
        "trace_sha256": base.trace.sha256,
        "base": base.name,
        "runs": [_pair(base, other) for other in others],
    }


def _pair(base: Result, other: Result) -> dict[str, Any]:
    rows = np.intersect1d(base.columns.row[base.columns.ok], other.columns.row[other.columns.ok])
    before, after = _values(base.columns, rows), _values(other.columns, rows)
    goods = [
        dict(zip(run.columns.row.tolist(), good_requests(run.columns, base.slo), strict=True))
        for run in (base, other)
    ]
    both = goods[0].keys() & goods[1].keys()
    return {
        "name": other.name,
        "paired": len(rows),
        "failed": [base.summary["failed"], other.summary["failed"]],
        "throughput_tokens_per_s": [
            run.summary["completion_throughput_tokens_per_s"] for run in (base, other)
        ],
        "attained_ratio": [run.summary["slo"]["attained_ratio"] for run in (base, other)],
        "good_only_in_base": sum(bool(goods[0][r] and not goods[1][r]) for r in both),
        "good_only_in_run": sum(bool(goods[1][r] and not goods[0][r]) for r in both),
        "metrics": {name: _difference(before[name], after[name]) for name in METRICS},
    }


def _values(columns: Columns, rows: np.ndarray) -> dict[str, Floats]:
    at = np.searchsorted(columns.row, rows)
    arrival, first = columns["scheduled_s"][at], columns["first_token_s"][at]
    last = columns["last_token_s"][at]
    tokens = columns.counts["completion_tokens"][at]
    later = np.maximum(tokens - first_tokens_of(columns)[at], 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(later > 0, (last - first) / later * 1e3, np.nan)
    return {
        "ttft_ms": (first - arrival) * 1e3,
        "tpot_ms": tpot,
        "completion_s": last - arrival,
        "normalized_latency_ms_per_token": (last - arrival) / tokens * 1e3,
    }


def _difference(before: Floats, after: Floats) -> dict[str, Any]:
    """Mean of after - before with its 95% bootstrap interval, and the share that got faster."""
    known = ~(np.isnan(before) | np.isnan(after))
    before, after = before[known], after[known]
    if not len(before):
        return dict.fromkeys(("base_mean", "run_mean", "difference", "ci_low", "ci_high", "ratio",
                              "faster_ratio"))  # fmt: skip
    change = after - before
    draws = Draws(0, STREAM)
    means = np.sort([change[draws.below(len(change), len(change))].mean()
                     for _ in range(RESAMPLES)])  # fmt: skip
    return {
        "base_mean": float(before.mean()), "run_mean": float(after.mean()),
        "difference": float(change.mean()),
        "ci_low": float(means[int(0.025 * RESAMPLES)]),
        "ci_high": float(means[int(0.975 * RESAMPLES) - 1]),
        "ratio": float(after.mean() / before.mean()) if before.mean() else None,
        "faster_ratio": float((change < 0).mean()),
    }  # fmt: skip
