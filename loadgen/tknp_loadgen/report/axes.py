"""How every figure looks: one frame, one font size, thin grid, colors by role."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tknp_loadgen.report.theme import LIGHT, PLACEHOLDERS, themed

Colors = Mapping[str, str]
Draw = Callable[[Axes, Colors], None]
WIDTH, HEIGHT = 6.4, 3.1  # inches of one panel
MARGINS = (0.68, 0.52, 0.62, 0.36)  # inches: left, bottom, right, top
DPI = 110


def style(axes: Axes, colors: Colors, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=colors["ink"], pad=8, weight="bold")
    axes.set_xlabel(x, fontsize=8.5, color=colors["muted"])
    axes.set_ylabel(y, fontsize=8.5, color=colors["muted"])
    axes.tick_params(labelsize=8, colors=colors["muted"], length=0)
    axes.grid(True, axis="y", color=colors["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(colors["line"])


def legend(axes: Axes, colors: Colors, **more: Any) -> None:
    """Above the plot, where it hides no data."""
    settings = {
        "loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "ncols": 4, "fontsize": 8,
        "frameon": False, "labelcolor": colors["ink"], "handlelength": 1.4, "borderpad": 0.2,
        "columnspacing": 1.2,
    }  # fmt: skip
    axes.legend(**(settings | more))


def logarithmic(axes: Axes, low: float, high: float) -> None:
    """A logarithmic x axis where values span more than a factor of 30."""
    if low > 0 and high / low > 30:
        axes.set_xscale("log")


def svg(draw: Draw, height: float = HEIGHT, width: float = WIDTH) -> str:
    """One panel as inline SVG that follows the page's colors."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": draw.__qualname__}):
        figure = Figure(figsize=(width, height))
        figure.patch.set_alpha(0)
        left, bottom, right, top = MARGINS
        figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
        draw(figure.add_subplot(), PLACEHOLDERS)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1
    )
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([0-9.]+px) [^;\"]*", r"font-size: \1", text)
    text = re.sub(r"font: bold ([0-9.]+px) [^;\"]*", r"font-weight: 600; font-size: \1", text)
    return themed(text)


def png(draws: list[tuple[Draw, float]], path: Any) -> None:
    """All panels below each other, two in a row, in the light colors."""
    rows = math.ceil(len(draws) / 2)
    heights = [max(h for _, h in draws[2 * row : 2 * row + 2]) for row in range(rows)]
    width, height = 2 * WIDTH, sum(heights)
    figure = Figure(figsize=(width, height), dpi=DPI)
    figure.patch.set_facecolor(LIGHT["paper"])
    left, bottom, right, top = MARGINS
    above = height
    for number, (draw, _) in enumerate(draws):
        row, column = divmod(number, 2)
        if column == 0:
            above -= heights[row]
        alone = number == len(draws) - 1 and column == 0
        wide = width if alone else WIDTH
        box = (
            (column * WIDTH + left) / width, (above + bottom) / height,
            (wide - left - right) / width, (heights[row] - bottom - top) / height,
        )  # fmt: skip
        draw(figure.add_axes(box), LIGHT)
    figure.savefig(path, format="png")
