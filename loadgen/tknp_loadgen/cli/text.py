"""A run's summary on a terminal."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

ROWS = {
    "ttft_ms": ("TTFT", "ms"), "tpot_ms": ("TPOT", "ms"), "itl_ms": ("ITL, a token", "ms"),
    "max_stall_ms": ("longest stall", "ms"), "queue_wait_ms": ("queue wait", "ms"),
    "completion_s": ("completion", "s"),
    "normalized_latency_ms_per_token": ("normalized latency", "ms/token"),
    "client_lag_ms": ("client lag", "ms"),
}  # fmt: skip
COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def number(value: float | None) -> str:
    """Three digits or more, never an exponent."""
    if value is None:
        return "-"
    if math.isinf(value):
        return "inf"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.4g}".rstrip("0").rstrip(".")


def print_summary(summary: Mapping[str, Any]) -> None:
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 110)
    verdict = "[green]valid[/]" if summary["valid"] else "[red]INVALID[/]"
    slo = summary["slo"]
    console.print(
        f"[bold]{summary['name']}[/]  trace {summary['trace_sha256'][:12]}  {verdict}"
        + (f"  stopped: {summary['stopped']}" if summary.get("stopped") else "")
    )
    for reason in summary["invalid_reasons"]:
        console.print(f"  [red]{reason}[/]")
    console.print(
        f"{summary['scheduled']} scheduled, {summary['completed']} completed, "
        f"{summary['failed']} failed; offered {number(summary['offered_rate_per_s'])}/s, "
        f"{number(summary['completion_throughput_tokens_per_s'])} tokens/s from release to the "
        "last completion"
    )
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    table.add_column("")
    for key, (name, unit) in ROWS.items():
        values = summary.get(key)
        if values:
            table.add_row(name, *(number(values[column]) for column in COLUMNS), unit)
    console.print(table)
    bounds = " and ".join(f"{key} <= {limit:g} ms" for key, limit in slo["bounds_ms"].items())
    color = "green" if slo["met"] else "red"
    console.print(
        f"SLO {bounds}: [{color}]{slo['good']}/{slo['scheduled']} = {slo['attained_ratio']:.1%}[/] "
        f"(95% interval {slo['ci_low']:.1%} to {slo['ci_high']:.1%}), "
        f"goodput {number(slo['goodput_per_s'])}/s"
    )
    for reason, count in summary["errors"].items():
        console.print(f"[red]{count} x[/] {reason}", soft_wrap=True, highlight=False)
    for warning in summary["warnings"]:
        console.print(f"[dim]note: {warning}[/]", soft_wrap=True)
