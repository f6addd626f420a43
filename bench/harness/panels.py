"""How the plots of benchmarks look: the frame and colors of load reports, lines told apart twice.

Every line has a color, a marker and a stroke of its own, so that a plot can be read without color;
variants of one strategy share its color. One legend stands below all panels, in the order of lines.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tknp_loadgen.report.theme import LIGHT

MUTED = LIGHT["muted"]
_COLUMNS = 3
_WIDE, _HIGH = 4.1, 3.0  # inches of a panel
_LEGEND_COLUMNS = 5
_ROW, _LINE, _DPI = 0.22, 0.17, 150  # inches of a legend row and of a caption line


@dataclass(frozen=True)
class Look:
    """Of one line. `role`: of the theme; `stroke`, `marker`: as matplotlib has them."""

    role: str
    marker: str = "o"
    stroke: str = "-"

    @property
    def color(self) -> str:
        return LIGHT[self.role]

    def plain(self) -> dict[str, Any]:
        """Keywords of `Axes.plot`."""
        return {
            "color": self.color, "marker": self.marker, "linestyle": self.stroke,
            "markersize": 4.5, "linewidth": 1.5, "markeredgewidth": 0,
        }  # fmt: skip


def panels(count: int, wide: float = _WIDE) -> tuple[Any, list[Any]]:
    """A figure of `count` panels, three in a row."""
    from matplotlib.figure import Figure

    columns = min(count, _COLUMNS)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(wide * columns, _HIGH * rows), facecolor=LIGHT["paper"])
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    for empty in grid[count:]:
        empty.set_axis_off()
    return figure, list(grid[:count])


def style(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=LIGHT["ink"], pad=18, weight="bold")
    axes.set_xlabel(x, fontsize=8.5, color=MUTED)
    axes.set_ylabel(y, fontsize=8.5, color=MUTED)
    axes.tick_params(labelsize=8, colors=MUTED, length=0)
    axes.grid(True, axis="y", color=LIGHT["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylim(0, max(axes.dataLim.y1 * 1.08, 1e-9))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(LIGHT["line"])


def batches(axes: Any, counts: Iterable[int]) -> None:
    """A logarithmic x axis with `counts` on it."""
    known = sorted(counts)
    axes.set_xscale("log", base=2)
    axes.set_xticks(known, [str(count) for count in known])
    axes.minorticks_off()
    axes.set_xlim(known[0] / 1.3, known[-1] * 1.3)


def column(axes: Any, xs: Sequence[float], runs: Sequence[Sequence[float]], look: Look) -> None:
    """A thin line from the least to the most of each of `runs`."""
    axes.vlines(
        xs, [min(values) for values in runs], [max(values) for values in runs], color=look.color,
        linewidth=0.8, alpha=0.6,
    )  # fmt: skip


def save(figure: Any, found: Sequence[Any], path: Path, caption: str, order: Sequence[str]) -> Path:
    """Write a PNG with one legend of all panels, in `order`, and `caption` below them."""
    named: dict[str, Any] = {}
    for axes in found:
        named |= {n: line for line, n in zip(*axes.get_legend_handles_labels(), strict=True)}
    named = {name: named[name] for name in sorted(named, key=list(order).index)}
    width, above = figure.get_size_inches()
    lines = textwrap.wrap(caption, round(width * 15.5))
    columns = min(len(named), max(2, int(width / 1.75)), _LEGEND_COLUMNS)
    legend = _ROW * math.ceil(len(named) / columns)
    below = legend + _LINE * len(lines) + 0.2
    height = above + below
    figure.set_size_inches(width, height)
    figure.tight_layout(rect=(0, below / height, 1, 1), w_pad=1.5, h_pad=1.5)
    figure.legend(
        named.values(), named.keys(), loc="upper center", bbox_to_anchor=(0.5, below / height),
        ncols=columns, fontsize=8, frameon=False, labelcolor=LIGHT["ink"], handlelength=2.6,
        borderpad=0,
    )  # fmt: skip
    figure.text(0.01, 0.07 / height, "\n".join(lines), fontsize=7.5, color=MUTED, va="bottom")
    figure.savefig(path, dpi=_DPI)
    return path
