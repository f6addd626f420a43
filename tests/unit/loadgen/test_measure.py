"""Percentiles, intervals, validity, SLO, server counters: plain functions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.measure.jsonio import dumps
from tknp_loadgen.measure.percentile import (
    EXACT_MICROSECONDS,
    GapCounts,
    distribution,
    needed_samples,
    rank,
    wilson,
)
from tknp_loadgen.measure.server import Scrape, kv_usage, parse_text, read_scrapes, server_summary
from tknp_loadgen.measure.slo import Slo
from tknp_loadgen.measure.validity import burst_spread_s, lag_limit_ms, rate_error, reasons
from tknp_loadgen.run.watch import WINDOW, Totals, Watch, total

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=60)
GOOD = {"worker": 0, "cpu_ratio": 0.2, "loop_lag_p99_ms": 1.0, "wall_s": 10.0}


@settings(max_examples=50)
@given(VALUES, st.integers(0, 20))
def test_percentiles_are_numpys_inverted_cdf(values: list[float], failures: int) -> None:
    everything = np.array(values + [math.inf] * failures)
    made = distribution(np.array(values), failures)
    for name, quantile in (("p50", 0.5), ("p90", 0.9), ("p95", 0.95), ("p99", 0.99)):
        assert made[name] == np.sort(everything)[rank(quantile, len(everything))]
        assert made[name] == np.quantile(everything, quantile, method="inverted_cdf")
    assert made["count"] == len(everything)


def test_nothing_measured_is_none() -> None:
    made = distribution(np.empty(0))
    assert made["mean"] is made["p50"] is made["max"] is None
    assert math.isinf(distribution(np.empty(0), 3)["p50"])


def test_p95_intervals() -> None:
    low, high = distribution(np.arange(1000.0))["p95_ci"]
    assert low < 949 < high < 970
    assert math.isinf(distribution(np.arange(30.0))["p95_ci"][1])


@settings(max_examples=12)
@given(st.lists(st.tuples(st.floats(0, 2 * EXACT_MICROSECONDS), st.integers(1, 9)), min_size=1))
def test_counted_gaps_are_exact_to_the_microsecond(gaps: list[tuple[float, int]]) -> None:
    counts = GapCounts()
    for gap, weight in gaps:
        counts.add(np.array([gap]), np.array([float(weight)]))
    each = np.repeat([gap for gap, _ in gaps], [weight for _, weight in gaps]) / 1e3
    made = counts.distribution_ms()
    for name, quantile in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        true = np.quantile(each, quantile, method="inverted_cdf")
        assert made[name] == pytest.approx(true, abs=0.0011)
    assert made["max"] == pytest.approx(each.max())
    assert made["mean"] == pytest.approx(each.mean())
    assert made["count"] == len(each)


def test_wilson_intervals_and_samples() -> None:
    """Of 128 requests 115 were good: 83 to 94%, so nothing is known about 90%."""
    low, high = wilson(115, 128)
    assert (round(low, 2), round(high, 2)) == (0.83, 0.94)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 10)[1] == 1.0
    assert [needed_samples(q) for q in (0.5, 0.95, 0.99, 0.999)] == [6, 72, 368, 3688]


def test_slo() -> None:
    slo = Slo.parse(["ntpot:100", "ttft:2000"])
    values = {"ntpot": 100.0, "ttft": 2000.0, "tpot": None, "stall": None, "e2el": 1.0}
    assert slo.good(values)
    assert not slo.good(values | {"ntpot": 100.001})
    assert Slo.parse(["tpot:1"]).good(values)
    assert str(slo) == "ntpot <= 100 ms and ttft <= 2000 ms"
    for wrong in ("ntpot", "speed:3", "ttft:-1", "ttft:soon", "ttft:nan"):
        with pytest.raises(InputError, match="goodput"):
            Slo.parse([wrong])


def test_a_busy_or_late_client_makes_a_run_invalid() -> None:
    """A busy client inflates TTFT and ITL elsewhere, and nobody is told."""
    assert reasons(0.5, 300.0, 0.0, 60.0, [GOOD]) == []
    assert "late at p99" in reasons(5.5, 300.0, 0.0, 60.0, [GOOD])[0]
    assert reasons(5.5, 1000.0, 0.0, 60.0, [GOOD]) == []  # 1% of the median TTFT
    assert reasons(5.5, 300.0, 0.0, 60.0, [GOOD], max_lag_ms=6.0) == []
    assert "rate sent" in reasons(0.5, 300.0, 0.011, 60.0, [GOOD])[0]
    assert reasons(0.5, 300.0, 0.011, 0.1, [GOOD]) == []  # 1 ms of a short run
    assert "sockets" in reasons(0.5, 300.0, None, 60.0, [GOOD | {"loop_lag_p99_ms": 7.0}])[0]
    assert "--processes" in reasons(0.5, 300.0, None, 60.0, [GOOD | {"cpu_ratio": 0.99}])[0]
    assert lag_limit_ms(math.inf) == lag_limit_ms(None) == 5.0


def test_rate_error_and_burst_spread() -> None:
    at = np.array([0.0, 5.0, 10.0])
    assert rate_error(at, np.array([0.0, 3.0, 0.2])) == pytest.approx(0.02)
    assert rate_error(np.zeros(3), np.zeros(3)) is None
    assert rate_error(at[:1], at[:1]) is None
    assert burst_spread_s(
        np.array([0, 0, 0, 1.0, 2, 2]), np.array([0.001, 0.004, 0.002, 1.9, 2.0, 2.01])
    ) == pytest.approx(0.01)
    assert burst_spread_s(at, at) is None


def test_json_that_any_parser_reads() -> None:
    text = dumps({"a": math.inf, "b": [-math.inf, math.nan], "c": "Infinity", "d": (1, 2.5)})
    assert "Infinity" in text
    assert text.count("Infinity") == 1
    assert json.loads(text) == {"a": math.inf, "b": [-math.inf, None], "c": "Infinity",
                                "d": [1, 2.5]}  # fmt: skip


BEFORE = """\
# TYPE t_seconds histogram
t_seconds_bucket{le="0.1"} 5
t_seconds_bucket{le="1"} 5
t_seconds_bucket{le="+Inf"} 5
t_seconds_sum 0.1
t_seconds_count 5
# TYPE r counter
r_total{outcome="completed"} 3
# TYPE tknp_kv_usage_ratio gauge
tknp_kv_usage_ratio{node="0"} 0.25
tknp_kv_usage_ratio{node="1"} 0.5
"""
AFTER = (
    BEFORE.replace('le="0.1"} 5', 'le="0.1"} 65').replace('le="1"} 5', 'le="1"} 103')
    .replace('le="+Inf"} 5', 'le="+Inf"} 105').replace("} 3", "} 7").replace("0.5", "0.75")
)  # fmt: skip


def test_server_counters_are_differences(tmp_path: Path) -> None:
    path = tmp_path / "server_metrics.jsonl"
    with path.open("w") as file:
        for at_s, text in ((-0.1, BEFORE), (9.0, AFTER)):
            said = {"at_s": at_s, "url": "http://x", "samples": parse_text(text)}
            file.write(json.dumps(said) + "\n")
    scrapes = read_scrapes(path)
    summary = server_summary(scrapes)
    assert summary is not None
    made = summary["http://x"]
    assert made["counters"] == {'r_total{outcome="completed"}': 4}
    histogram = made["histograms"]["t_seconds"]
    assert (histogram["count"], histogram["p50"], histogram["p95"]) == (100, [0.0, 0.1], [0.1, 1.0])
    assert histogram["p99"] == [1.0, math.inf]
    assert made["kv_usage_max_ratio"] == 0.75
    assert kv_usage(scrapes[0]) == 0.5
    assert kv_usage(Scrape(0, "x", {})) is None
    assert server_summary([]) is None
    path.write_text('{"at_s": 1}\n')
    with pytest.raises(FileError, match=r"jsonl:1: not a scrape"):
        read_scrapes(path)


def totals(ended: int, failed: int, good: int, overdue: int = 0) -> Totals:
    return Totals(ended=ended, failed=failed, good=good, overdue=overdue)


def test_too_many_errors_stop_a_run() -> None:
    watch = Watch(0.1, None)
    assert watch.look(totals(19, 19, 0)) is None  # too few to say
    assert watch.look(totals(100, 10, 0)) is None
    assert watch.look(totals(100, 11, 0)) == "errors"
    assert Watch(None, None).look(totals(100, 100, 0)) is None


def test_a_saturated_server_stops_a_run() -> None:
    watch = Watch(None, 0.9)
    assert watch.look(totals(1000, 0, 1000)) is None
    assert watch.look(totals(1000 + WINDOW // 2, 0, 1000 + WINDOW // 2 - 4)) is None
    assert watch.look(totals(1000 + WINDOW, 0, 1000 + WINDOW - 6)) == "saturated"
    late = Watch(None, 0.9)
    assert late.look(totals(WINDOW, 0, WINDOW, overdue=5)) is None
    assert late.look(totals(WINDOW, 0, WINDOW, overdue=6)) == "saturated"


def test_workers_progress_adds_up() -> None:
    one = {"released": 5, "open": 1, "good": 2, "overdue": 0, "tokens": 7, "lag_ms": 1.0,
           "statuses": {"ok": 2, "error": 1, "cancelled": 1}, "ttft_ms": None,
           "tpot_ms": 4.0}  # fmt: skip
    both = total([one, one | {"lag_ms": 3.0}])
    assert (both.released, both.ended, both.failed, both.good) == (10, 6, 2, 4)
    assert both.medians == {"lag_ms": 2.0, "ttft_ms": None, "tpot_ms": 4.0}
