"""A picture of steps as data: for each node its lanes, and when each was busy.

    node 0   dense      ██  ██  ██
             attention    ▓▓  ▓▓
             exchange    ▒ ▒ ▒ ▒
             idle       ░     ░

Drawn by `html` and `png`. A step of many layers gets two panels, the whole and a closer look at
the end of the first block, where the root changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.planner.spans import LANES, Span, busy_ratio, idle, window

IDLE = "idle"
ROWS = (*LANES, IDLE)
_CLOSE_LAYERS = 4
_FEW_LAYERS = 8
_GRAIN = 2000  # bars closer than 1 / _GRAIN of a panel become one


@dataclass(frozen=True)
class Bar:
    """From `start_s` to `stop_s`, counted from the left edge. `stream` -1: of none (idle)."""

    start_s: float
    stop_s: float
    stream: int
    label: str


@dataclass(frozen=True)
class Track:
    """One rank. `bars[i]`: of ROWS[i]; `ratios[i]`: its share of the panel's time."""

    name: str
    bars: tuple[tuple[Bar, ...], ...]
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class Panel:
    title: str
    seconds: float
    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Timeline:
    """`streams`: how many colours a lane needs."""

    title: str
    subtitle: str
    streams: int
    panels: tuple[Panel, ...]


def draw(
    spans: Sequence[Span], title: str, subtitle: str, *, start_s: float, stop_s: float
) -> Timeline:
    """The time from `start_s` to `stop_s` of the ranks that `spans` are of."""
    streams = 1 + max((span.stream for span in spans), default=0)
    panels = [_panel(spans, "", start_s, stop_s)]
    if close := _closer(window(spans, start_s, stop_s), stop_s - start_s):
        at, until, layer = close
        name = f"a closer look: around layer {layer}"
        panels.append(_panel(spans, name, start_s + at, start_s + until))
    return Timeline(title, subtitle, streams, tuple(panels))


def _closer(spans: Sequence[Span], seconds: float) -> tuple[float, float, int] | None:
    """Where a few layers around the first handoff (else in the middle) are, in their window."""
    layers = {span.layer for span in spans if span.layer >= 0}
    if len(layers) <= _FEW_LAYERS:
        return None
    handoffs = [span for span in spans if span.kind is Kind.HANDOFF and span.stream == 0]
    middle = min(handoffs, key=lambda s: s.end_s, default=None)
    if middle is None:
        of_stream = [span for span in spans if span.layer >= 0 and span.stream == 0]
        middle = min(of_stream, key=lambda s: abs(s.start_s - seconds / 2))
    length = seconds * _CLOSE_LAYERS / len(layers)
    start = min(max(middle.end_s - length / 2, 0.0), seconds - length)
    return start, start + length, middle.layer


def _panel(spans: Sequence[Span], title: str, start_s: float, stop_s: float) -> Panel:
    shown = window(spans, start_s, stop_s)
    seconds = stop_s - start_s
    ranks = sorted({span.rank for span in spans})
    several = len({rank.t for rank in ranks}) > 1
    of_rank = {rank: [span for span in shown if span.rank == rank] for rank in ranks}
    tracks = tuple(_track(_name(r, several), of_rank[r], seconds) for r in ranks)
    return Panel(title, seconds, tracks)


def _name(rank: Rank, several: bool) -> str:
    return f"node {rank.node}" + (f", t {rank.t}" if several else "")


def _track(name: str, spans: Sequence[Span], seconds: float) -> Track:
    bars = [
        _coarse([Bar(*s.busy_s, s.stream, _label(s)) for s in spans if s.lane == lane], seconds)
        for lane in LANES
    ]
    gaps = idle(spans, 0.0, seconds)
    bars.append(_coarse([Bar(start, stop, -1, IDLE) for start, stop in gaps], seconds))
    ratios = [busy_ratio(spans, lane, seconds) for lane in LANES]
    ratios.append(sum(stop - start for start, stop in gaps) / seconds)
    return Track(name, tuple(bars), tuple(ratios))


def _label(span: Span) -> str:
    where = f" of layer {span.layer}" if span.layer >= 0 else ""
    busy = (span.seconds - span.waited_s) * 1e6
    return f"{span.kind}{where}, stream {span.stream}, step {span.step}: {busy:.1f} µs"


def _coarse(bars: Sequence[Bar], seconds: float) -> tuple[Bar, ...]:
    """`bars` in order; neighbours of one stream that no eye could tell apart are one."""
    grain, kept = seconds / _GRAIN, list[Bar]()
    last: dict[int, int] = {}
    for bar in sorted(bars, key=lambda b: (b.start_s, b.stop_s)):
        if bar.stop_s <= bar.start_s:
            continue
        at = last.get(bar.stream)
        tiny = bar.stop_s - bar.start_s < grain
        if at is not None and tiny and bar.start_s - kept[at].stop_s < grain:
            before = kept[at]
            stop = max(before.stop_s, bar.stop_s)
            kept[at] = Bar(before.start_s, stop, bar.stream, before.label)
            continue
        last[bar.stream] = len(kept)
        kept.append(bar)
    return tuple(kept)
