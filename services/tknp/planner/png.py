"""A timeline as a picture, drawn by matplotlib (the `planner` extra)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tknp.errors import Unavailable
from tknp.planner.html import ticks, time_text
from tknp.planner.timeline import IDLE, ROWS, Panel, Timeline

_COLOURS = {
    "dense": ("#2f6fde", "#8db4f2"),
    "attention": ("#d9720f", "#f2b679"),
    "exchange": ("#12876b", "#7cc7b2"),
    IDLE: ("#c9d0d9", "#c9d0d9"),
}
_INK, _FAINT, _RULE, _BAND = "#1c2430", "#6b7685", "#e2e6ec", "#f5f7fa"
_WIDTH_IN, _ROW_IN, _FRAME_IN = 12.0, 0.17, 0.75
_TRACK_ROWS = len(ROWS) + 0.9
_PIXELS = 1500  # across a panel: nothing is drawn narrower than one


def write(timeline: Timeline, path: Path) -> None:
    """Write `timeline` to `path`; raises Unavailable where matplotlib is not installed."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise Unavailable(
            "a PNG needs matplotlib: pip install 'tknp[planner]', or name the file .html"
        ) from error
    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = [len(panel.tracks) * _TRACK_ROWS for panel in timeline.panels]
    height = sum(rows) * _ROW_IN + _FRAME_IN * len(rows) + 0.75
    figure, axes = pyplot.subplots(
        len(rows), 1, figsize=(_WIDTH_IN, height), squeeze=False, height_ratios=rows,
    )  # fmt: skip
    for axis, panel in zip(axes[:, 0], timeline.panels, strict=True):
        _panel(axis, panel)
    figure.subplots_adjust(
        left=0.115, right=0.95, bottom=0.42 / height, top=1 - 0.95 / height,
        hspace=_FRAME_IN / (sum(rows) * _ROW_IN / len(rows)),
    )  # fmt: skip
    figure.text(0.012, 1 - 0.3 / height, timeline.title, size=13, weight="bold", color=_INK)
    figure.text(0.012, 1 - 0.53 / height, timeline.subtitle, size=9, color=_FAINT)
    figure.legend(
        handles=[Patch(color=_COLOURS[row][shade], label=_name(row, shade))
                 for row in ROWS for shade in range(min(timeline.streams, 2))
                 if shade == 0 or row != IDLE],
        loc="upper right", bbox_to_anchor=(0.99, 1 - 0.1 / height), ncols=4, fontsize=8,
        frameon=False, handlelength=1.0, labelcolor=_FAINT,
    )  # fmt: skip
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _name(row: str, shade: int) -> str:
    return f"{row}, odd streams" if shade else row


def _panel(axis: Any, panel: Panel) -> None:
    places, labels = [], []
    hair = panel.seconds / _PIXELS
    for i, track in enumerate(panel.tracks):
        top = i * _TRACK_ROWS
        axis.text(-0.115, top + 0.45, track.name, transform=axis.get_yaxis_transform(),
                  size=9, weight="bold", color=_INK, va="center")  # fmt: skip
        for j, row in enumerate(ROWS):
            y = top + j
            places.append(y + 0.45)
            labels.append(row)
            axis.axhspan(y + 0.04, y + 0.86, color=_BAND, lw=0)
            axis.text(1.006, y + 0.45, f"{track.ratios[j]:.0%}", size=7.5, color=_FAINT,
                      transform=axis.get_yaxis_transform(), va="center")  # fmt: skip
            bars = track.bars[j]
            if bars:
                axis.broken_barh(
                    [(b.start_s, max(b.stop_s - b.start_s, hair)) for b in bars], (y + 0.04, 0.82),
                    facecolors=[_COLOURS[row][bar.stream % 2] for bar in bars], lw=0,
                )  # fmt: skip
    axis.set_xlim(0, panel.seconds)
    axis.set_ylim(len(panel.tracks) * _TRACK_ROWS - 0.6, -0.2)
    axis.set_yticks(places, labels, size=7.5, color=_FAINT)
    marks = ticks(panel.seconds)
    axis.set_xticks(marks, [time_text(t, panel.seconds) for t in marks], size=8, color=_FAINT)
    axis.grid(axis="x", color=_RULE, lw=0.6)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    for side in axis.spines.values():
        side.set_visible(False)
    if panel.title:
        axis.set_title(panel.title, loc="left", size=9, weight="bold", color=_INK, pad=4)
