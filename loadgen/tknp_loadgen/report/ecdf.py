"""Cumulative distributions. Failures never arrive: a curve ends below 1 by their share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes

from tknp_loadgen.exact import Floats
from tknp_loadgen.measure.result import Result
from tknp_loadgen.report.axes import Colors, Draw, legend, logarithmic, style
from tknp_loadgen.report.theme import SERIES

POINTS = 400  # of one curve
Values = Callable[[Result], Floats]


def _of_requests(result: Result, ends: str, per_token: bool = False) -> Floats:
    columns = result.columns
    values = (columns[ends] - columns["scheduled_s"])[columns.ok]
    if per_token:
        return values / columns.counts["completion_tokens"][columns.ok] * 1e3
    return values * 1e3


def _curves(title: str, x: str, values: Values, results: Sequence[Result], mark: str) -> Draw:
    def draw(axes: Axes, colors: Colors) -> None:
        style(axes, colors, title, x, "share of requests")
        low, high = np.inf, 0.0
        for number, result in enumerate(results):
            ordered = np.sort(values(result))
            if not len(ordered):
                continue
            total = max(result.summary["scheduled"], len(ordered))
            shares = np.arange(1, len(ordered) + 1) / total
            picks = np.unique(np.linspace(0, len(ordered) - 1, POINTS).astype(int))
            axes.step(ordered[picks], shares[picks], where="post", linewidth=1.6,
                      color=colors[SERIES[number % len(SERIES)]], label=result.name)  # fmt: skip
            low, high = min(low, ordered[0]), max(high, ordered[-1])
        _finish(axes, colors, results, low, high)
        bound = results[0].slo.bounds.get(mark)
        if bound is not None and low < np.inf:
            axes.axvline(bound, color=colors["bad"], linewidth=1.2, linestyle=(0, (5, 3)))

    return draw


def _finish(axes: Axes, colors: Colors, results: Sequence[Result], low: float, high: float) -> None:
    axes.set_ylim(0, 1.02)
    if low < np.inf:
        logarithmic(axes, low, high)
    if len(results) > 1:
        legend(axes, colors, ncols=min(4, len(results)))


def ttft(results: Sequence[Result]) -> Draw:
    return _curves("Time to first token", "ms from scheduled arrival",
                   lambda r: _of_requests(r, "first_token_s"), results, "ttft")  # fmt: skip


def normalized(results: Sequence[Result]) -> Draw:
    return _curves("Normalized latency", "ms per output token",
                   lambda r: _of_requests(r, "last_token_s", True), results, "ntpot")  # fmt: skip


def completion(results: Sequence[Result]) -> Draw:
    return _curves("Completion time", "s from scheduled arrival",
                   lambda r: _of_requests(r, "last_token_s") / 1e3, results, "")  # fmt: skip


def itl(results: Sequence[Result]) -> Draw:
    """Over tokens of admitted requests."""

    def draw(axes: Axes, colors: Colors) -> None:
        style(axes, colors, "Inter-token latency", "ms, admitted requests", "share of tokens")
        low, high = np.inf, 0.0
        for number, result in enumerate(results):
            gaps, weights = result.tokens.itl.merged()
            if not len(gaps):
                continue
            shares = np.cumsum(weights) / weights.sum()
            picks = np.unique(np.searchsorted(shares, np.linspace(0, 1, POINTS)))
            picks = picks[picks < len(gaps)]
            axes.step(np.maximum(gaps[picks], 1) / 1e3, shares[picks], where="post", linewidth=1.6,
                      color=colors[SERIES[number % len(SERIES)]], label=result.name)  # fmt: skip
            usual = gaps[np.searchsorted(shares, 0.02)]  # a few gaps of 0 would stretch the axis
            low, high = min(low, max(usual, 1) / 1e3), max(high, gaps[-1] / 1e3)
        _finish(axes, colors, results, low, high)
        if low < np.inf:
            axes.set_xlim(left=low * 0.9)

    return draw
