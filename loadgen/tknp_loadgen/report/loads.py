"""Figures over loads: one point a run. Bursts have no rate and come last, as a category."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from tknp_loadgen.measure.result import Result
from tknp_loadgen.report.axes import Colors, Draw, style

Value = Callable[[Mapping[str, Any]], float | None]


def label(result: Result) -> tuple[float, str]:
    """Where a run stands among loads, and what it is called there."""
    arrivals = result.trace.generator.get("arrivals", {})
    if arrivals.get("kind") == "burst":
        return math.inf, f"burst {len(result.trace)}"
    if arrivals.get("kind") in ("poisson", "constant", "gamma"):
        return float(arrivals["rate"]), f"{arrivals['rate']:.4g}/s"
    rate = result.summary["offered_rate_per_s"]
    return (math.inf, result.name) if rate is None else (rate, f"{rate:.3g}/s")


def ordered(results: Sequence[Result]) -> list[Result]:
    return sorted(results, key=lambda result: (label(result)[0], len(result.trace)))


def _points(
    axes: Axes, colors: Colors, results: Sequence[Result], value: Value, color: str
) -> list[float]:
    runs = ordered(results)
    values = [value(run.summary) for run in runs]
    finite = [v if v is not None and math.isfinite(v) else math.nan for v in values]
    places = list(range(len(runs)))
    paced = [i for i, run in enumerate(runs) if math.isfinite(label(run)[0])]
    axes.plot(paced, [finite[i] for i in paced], "-o", color=colors[color], markersize=5,
              linewidth=1.8)  # fmt: skip
    rest = [i for i in places if i not in paced]
    axes.plot(rest, [finite[i] for i in rest], "D", color=colors[color], markersize=6)
    axes.set_xticks(places, [label(run)[1] for run in runs])
    axes.set_xlim(-0.5, len(runs) - 0.5)
    for place, known in zip(places, values, strict=True):
        if known is not None and math.isinf(known):
            axes.annotate("inf", (place, 0.92), xycoords=("data", "axes fraction"), ha="center",
                          fontsize=8, color=colors["bad"])  # fmt: skip
    return finite


def attainment(results: Sequence[Result]) -> Draw:
    target = float(results[0].summary["slo"]["target_ratio"])

    def draw(axes: Axes, colors: Colors) -> None:
        style(axes, colors, "SLO attainment", "offered load", "% of scheduled requests")
        shares = _points(axes, colors, results, lambda s: s["slo"]["attained_ratio"] * 100, "s0")
        for place, (run, share) in enumerate(zip(ordered(results), shares, strict=True)):
            slo = run.summary["slo"]
            axes.vlines(place, slo["ci_low"] * 100, slo["ci_high"] * 100, color=colors["s0"],
                        linewidth=1.2, alpha=0.5)  # fmt: skip
            axes.annotate(f"{share:.0f}%", (place, share), xytext=(6, 5), fontsize=8,
                          textcoords="offset points", color=colors["ink"])  # fmt: skip
        axes.axhline(target * 100, color=colors["bad"], linewidth=1.2, linestyle=(0, (5, 3)))
        axes.annotate(f"{target:.0%}", (1.0, target * 100), fontsize=8, va="top", ha="right",
                      xycoords=("axes fraction", "data"), color=colors["bad"])  # fmt: skip
        axes.set_ylim(0, 114)
        axes.set_yticks(range(0, 101, 20))

    return draw


def _bars(title: str, unit: str, value: Value, color: str, results: Sequence[Result]) -> Draw:
    def draw(axes: Axes, colors: Colors) -> None:
        style(axes, colors, title, "offered load", unit)
        values = _points(axes, colors, results, value, color)
        for place, known in enumerate(values):
            if math.isfinite(known):
                axes.annotate(f"{known:,.3g}", (place, known), xytext=(0, 7), fontsize=8,
                              textcoords="offset points", color=colors["ink"],
                              ha="center")  # fmt: skip
        top = max((v for v in values if math.isfinite(v)), default=1.0)
        axes.set_ylim(0, top * 1.2 or 1.0)

    return draw


def throughput(results: Sequence[Result]) -> Draw:
    return _bars(
        "Completion throughput", "tokens/s",
        lambda s: s["completion_throughput_tokens_per_s"], "s2", results,
    )  # fmt: skip


def p95_completion(results: Sequence[Result]) -> Draw:
    return _bars("p95 completion", "s from scheduled arrival",
                 lambda s: s["completion_s"]["p95"], "s1", results)  # fmt: skip
