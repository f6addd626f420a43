"""Figures over the time of one run: every request, load and server, the client's own lag."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.lines import Line2D

from tknp_loadgen.exact import Floats
from tknp_loadgen.measure.result import Result
from tknp_loadgen.measure.server import kv_usage, read_scrapes
from tknp_loadgen.report.axes import Colors, Draw, legend, style

MOST_LINES = 2000
STEPS = 400
MOST_DOTS = 3000


def requests(result: Result) -> Draw:
    """A line a request: waiting for its first token, then decoding, colored by its TPOT.

    Green keeps the SLO's ntpot bound as a pace, orange is up to twice as slow, red slower; gray
    did not complete.
    """

    def draw(axes: Axes, colors: Colors) -> None:
        columns = result.columns
        style(axes, colors, "Every request", "s from release", "request, in order of arrival")
        order = np.argsort(columns["scheduled_s"], kind="stable")
        picks = (
            order[np.unique(np.linspace(0, len(order) - 1, MOST_LINES).astype(int))]
            if len(order)
            else order
        )
        height = np.empty(len(columns))
        height[order] = np.arange(len(order))
        start, first = columns["scheduled_s"], columns["first_token_s"]
        last, ended = columns["last_token_s"], columns["ended_s"]
        waiting = np.where(np.isnan(first), ended, first)
        width = float(np.clip(150 / max(len(picks), 1), 0.5, 5.0))

        def lines(rows: np.ndarray, begin: Floats, end: Floats, role: str) -> None:
            segments = [((begin[i], height[i]), (end[i], height[i])) for i in rows]
            axes.add_collection(LineCollection(segments, colors=colors[role], linewidths=width))

        lines(picks, start, waiting, "wait")
        for role, rows in _paces(result, picks).items():
            lines(rows, first, np.where(np.isnan(last), ended, last), role)
        dead = picks[np.isnan(first[picks])]
        axes.plot(ended[dead], height[dead], "x", color=colors["bad"], markersize=4)
        axes.set_xlim(0, float(np.nanmax(ended)) * 1.01 if len(ended) else 1)
        axes.set_ylim(len(columns), -1)
        names = {"wait": "waiting", "good": "in pace", "fair": "to 2x", "bad": "slower",
                 "lost": "lost"}  # fmt: skip
        handles = [Line2D([], [], color=colors[role], linewidth=3, label=name)
                   for role, name in names.items()]  # fmt: skip
        legend(axes, colors, handles=handles, ncols=5)

    return draw


def _paces(result: Result, picks: np.ndarray) -> dict[str, np.ndarray]:
    columns = result.columns
    tokens = columns.counts["completion_tokens"][picks]
    spent = columns["last_token_s"][picks] - columns["first_token_s"][picks]
    pace = spent / np.maximum(tokens - 1, 1) * 1e3
    bound = result.slo.bounds.get("ntpot") or result.slo.bounds.get("tpot") or 100.0
    ok, begun = columns.ok[picks], ~np.isnan(columns["first_token_s"][picks])
    return {
        "good": picks[ok & (pace <= bound)],
        "fair": picks[ok & (pace > bound) & (pace <= 2 * bound)],
        "bad": picks[ok & (pace > 2 * bound)],
        "lost": picks[~ok & begun],
    }


def load(result: Result) -> Draw:
    """Requests in flight and tokens a second, with the server's KV usage where it was scraped."""

    def draw(axes: Axes, colors: Colors) -> None:
        columns = result.columns
        style(axes, colors, "Load over time", "s from release", "requests")
        end = float(np.nanmax(columns["ended_s"])) if len(columns) else 1.0
        times = np.linspace(0, end, STEPS)
        scheduled, ended = np.sort(columns["scheduled_s"]), np.sort(columns["ended_s"])
        arrived = np.searchsorted(scheduled, times, side="right")
        gone = np.searchsorted(ended, times, side="right")
        axes.fill_between(times, arrived - gone, color=colors["s0"], alpha=0.25, linewidth=0,
                          step="post")  # fmt: skip
        axes.step(times, arrived - gone, where="post", color=colors["s0"], linewidth=1.4,
                  label="in flight")  # fmt: skip
        axes.plot(scheduled, np.full(len(scheduled), 0.0), "|", color=colors["ink"], markersize=7,
                  alpha=0.5, label="arrival", clip_on=False)  # fmt: skip
        axes.set_xlim(0, end * 1.01)
        axes.set_ylim(bottom=0)
        handles = axes.get_legend_handles_labels()[0]
        right = axes.twinx()
        usage = [(scrape.at_s, value * 100)
                 for scrape in read_scrapes(result.directory / "server_metrics.jsonl")
                 if (value := kv_usage(scrape)) is not None and scrape.at_s >= 0]  # fmt: skip
        if usage:
            (line,) = right.plot(*zip(*usage, strict=True), color=colors["s1"], linewidth=1.4,
                                 label="KV cache in use")  # fmt: skip
            style(right, colors, "", "", "% of the fullest KV cache")
            right.set_ylim(0, 105)
        else:
            rate, step = _token_rate(result, end)
            (line,) = right.plot(
                step, rate, color=colors["s2"], linewidth=1.1, alpha=0.8, label="tokens/s"
            )
            style(right, colors, "", "", "tokens/s")
            right.set_ylim(bottom=0)
        right.grid(False)
        legend(axes, colors, handles=[*handles, line])

    return draw


def _token_rate(result: Result, end: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens a second over about a hundred equal stretches."""
    counts, bin_s = result.tokens.per_bin, result.tokens.bin_s
    wide = max(1, round(end / 100 / bin_s))
    whole = counts[: len(counts) // wide * wide] if len(counts) >= wide else counts
    if len(counts) < wide:
        return counts / bin_s, (np.arange(len(counts)) + 0.5) * bin_s
    rates = whole.reshape(-1, wide).sum(axis=1) / (wide * bin_s)
    return rates, (np.arange(len(rates)) + 0.5) * wide * bin_s


def lag(result: Result) -> Draw:
    """How late each request left, and the limit beyond which the run is invalid."""

    def draw(axes: Axes, colors: Colors) -> None:
        columns = result.columns
        style(axes, colors, "Client lag", "scheduled arrival, s", "ms late")
        sent = np.flatnonzero(~np.isnan(columns["lag_s"]))
        picks = (
            sent[np.unique(np.linspace(0, len(sent) - 1, MOST_DOTS).astype(int))]
            if len(sent)
            else sent
        )
        values = np.maximum(columns["lag_s"][picks] * 1e3, 1e-3)
        axes.plot(columns["scheduled_s"][picks], values, ".", color=colors["s3"], markersize=4,
                  alpha=0.7)  # fmt: skip
        axes.set_yscale("log")
        summary = result.summary["client_lag_ms"]
        for name, dashes in (("p50", (0, (1, 2))), ("p99", (0, (5, 3)))):
            if summary[name]:
                axes.axhline(summary[name], color=colors["muted"], linewidth=1.1, linestyle=dashes)
                axes.annotate(f"{name} {summary[name]:.2g} ms", (1.0, summary[name]), fontsize=8,
                              xycoords=("axes fraction", "data"), ha="right", va="bottom",
                              color=colors["ink"])  # fmt: skip

    return draw
