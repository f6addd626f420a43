"""The summary of a run: every measure, with its unit in its name.

Time zero of every latency is the *scheduled* arrival, so that waiting in the client counts.

    ttft_ms                         to the first chunk that carries a token
    tpot_ms                         (last - first) / tokens after the first chunk; none of a single
                                    chunk
    itl_ms, icl_ms                  see `tokens`; of requests that got a token (admitted ones)
    max_stall_ms                    each request's longest gap between chunks
    completion_s                    to the last token, of all requests
    normalized_latency_ms_per_token to the last token, over output tokens (the paper's SLO)
    queue_wait_ms                   in the server, where it reports that
    completion_throughput_tokens_per_s  tokens of completed requests, from the first arrival to the
                                    last completion, drain included

Failures are +inf in percentiles and misses in attainment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tknp_loadgen.exact import Integers
from tknp_loadgen.measure.columns import Columns
from tknp_loadgen.measure.percentile import QUANTILES, distribution, needed_samples, wilson
from tknp_loadgen.measure.slo import Slo, request_values_ms
from tknp_loadgen.measure.tokens import Tokens
from tknp_loadgen.measure.validity import burst_spread_s, rate_error, reasons

SCHEMA_VERSION = 1


def good_requests(columns: Columns, slo: Slo) -> np.ndarray:
    """Whether each request was completed within the SLO."""
    good = columns.ok.copy()
    for index in np.flatnonzero(good).tolist():
        gap = float(columns["max_gap_s"][index])
        good[index] = slo.good(
            request_values_ms(
                float(columns["scheduled_s"][index]), float(columns["first_token_s"][index]),
                float(columns["last_token_s"][index]),
                int(columns.counts["completion_tokens"][index]),
                _first_tokens(columns, index), None if np.isnan(gap) else gap,
            )
        )  # fmt: skip
    return good


def first_tokens_of(columns: Columns) -> Integers:
    """Tokens of every request's first chunk."""
    return np.array([_first_tokens(columns, i) for i in range(len(columns))], np.int64)


def _first_tokens(columns: Columns, index: int) -> int:
    """Tokens of the first chunk; an equal share where the server does not tell."""
    counts = columns.counts
    counted, told = int(counts["counted_tokens"][index]), int(counts["completion_tokens"][index])
    if told > counted:
        return round(told / int(counts["chunks"][index]))
    return int(counts["first_chunk_tokens"][index])


def summarize(
    columns: Columns,
    tokens: Tokens,
    slo: Slo,
    *,
    slo_target: float,
    trace_rows: int,
    input_tokens: np.ndarray,
    workers: Sequence[Mapping[str, Any]],
    max_lag_ms: float | None,
) -> dict[str, Any]:
    """The measures of one run. `trace_rows`: rows it should have sent."""
    ok, counted = columns.ok, columns.scheduled
    failures = int((counted & ~ok).sum())
    scheduled = int(counted.sum())
    at, first, last = columns["scheduled_s"], columns["first_token_s"], columns["last_token_s"]
    outputs = columns.counts["completion_tokens"]
    first_tokens = first_tokens_of(columns)
    later = ok & (outputs > first_tokens)
    sent = ~np.isnan(columns["released_s"])

    def latency(ends: np.ndarray, scale: float) -> dict[str, Any]:
        return distribution((ends - at)[ok] * scale, failures)

    ttft = latency(first, 1e3)
    from_send = distribution((first - columns["released_s"])[ok] * 1e3, failures)
    tpot = distribution((last - first)[later] / (outputs - first_tokens)[later] * 1e3, failures)
    stalls = columns["max_gap_s"][counted & ~np.isnan(columns["max_gap_s"])]
    queue = columns["queue_s"][ok & ~np.isnan(columns["queue_s"])]
    normalized = distribution((last - at)[ok] / outputs[ok] * 1e3, failures)
    lags = columns["lag_s"][sent] * 1e3
    lag = distribution(lags) | {
        "burst_spread": _ms(burst_spread_s(at[sent], columns["released_s"][sent]))
    }
    error = rate_error(at[sent], columns["lag_s"][sent])
    good = int(good_requests(columns, slo)[counted].sum())
    low, high = wilson(good, scheduled)
    start = float(at[counted].min()) if scheduled else 0.0
    span_s = float(last[ok].max()) - start if ok.any() else 0.0
    arrivals_s = float(at[counted].max()) - start if scheduled else 0.0
    wrong = reasons(lag["p99"], ttft["p50"], error, arrivals_s, workers, max_lag_ms)
    told = columns["prompt_tokens"]
    mismatched = int((ok & ~np.isnan(told) & (told != input_tokens[columns.row])).sum())
    completed_tokens = int(outputs[ok].sum())
    return {
        "schema_version": SCHEMA_VERSION,
        "valid": not wrong,
        "invalid_reasons": wrong,
        "scheduled": scheduled,
        "completed": int(ok.sum()),
        "failed": failures,
        "not_released": trace_rows - len(columns),
        "by_status": columns.by_status(),
        "error_ratio": failures / scheduled if scheduled else 0.0,
        "errors": dict(columns.errors.most_common(20)),
        "offered_rate_per_s": (scheduled - 1) / arrivals_s if arrivals_s else None,
        "completed_rate_per_s": int(ok.sum()) / span_s if span_s else None,
        "rate_error_ratio": error,
        "span_s": span_s,
        "completed_tokens": completed_tokens,
        "received_tokens": round(tokens.total),
        "completion_throughput_tokens_per_s": completed_tokens / span_s if span_s else 0.0,
        "arrival_window_throughput_tokens_per_s":
            (tokens.in_window / arrivals_s) if arrivals_s else None,
        "ttft_ms": ttft,
        "ttft_from_send_ms": from_send,
        "tpot_ms": tpot,
        "itl_ms": dict(tokens.itl.distribution_ms()),
        "icl_ms": dict(tokens.icl.distribution_ms()),
        "max_stall_ms": distribution(stalls * 1e3),
        "completion_s": latency(last, 1.0),
        "normalized_latency_ms_per_token": normalized,
        "queue_wait_ms": distribution(queue * 1e3) if len(queue) else None,
        "stream_close_ms": distribution((columns["ended_s"] - last)[ok] * 1e3),
        "admitted": int((counted & ~np.isnan(first)).sum()),
        "estimated_chunk_sizes": tokens.estimated_requests,
        "slo": {
            "bounds_ms": dict(slo.bounds), "good": good, "scheduled": scheduled,
            "attained_ratio": good / scheduled if scheduled else 0.0, "ci_low": low,
            "ci_high": high, "target_ratio": slo_target,
            "met": scheduled > 0 and good / scheduled >= slo_target,
            "goodput_per_s": good / span_s if span_s else 0.0,
        },
        "client_lag_ms": lag,
        "client": {
            "workers": [dict(worker) for worker in workers], "retries": columns.retries,
            "late_connections": sum(worker["late_connections"] for worker in workers),
            "late_encodings": sum(worker["late_encodings"] for worker in workers),
        },
        "prompt_length_mismatches": mismatched,
        "answers": {"checked": columns.answers_checked, "found": columns.answers_found},
        "warnings": _warnings(scheduled, mismatched, tokens, workers),
    }  # fmt: skip


def _warnings(
    scheduled: int, mismatched: int, tokens: Tokens, workers: Sequence[Mapping[str, Any]]
) -> list[str]:
    found = []
    for name, quantile in QUANTILES.items():
        if scheduled < (needed := needed_samples(quantile)):
            found.append(f"{name} of {scheduled} requests says little: it needs {needed}")
    if mismatched:
        found.append(f"the server counted other prompt lengths than the trace in {mismatched} "
                     "requests")  # fmt: skip
    if tokens.estimated_requests:
        found.append(
            f"the server did not tell the tokens of each chunk in "
            f"{tokens.estimated_requests} requests: their ITL takes equal chunks"
        )
    for name, words in (("late_connections", "waited for a connection to open"),
                        ("late_encodings", "waited for their prompt to be encoded")):  # fmt: skip
        if total := sum(int(worker[name]) for worker in workers):
            found.append(f"{total} requests {words}")
    return found


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3
