"""What a rank did when: simulated or recorded, the same record. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tknp.engine.times import part_of
from tknp.layout.program import Kind
from tknp.layout.rank import Rank

Lane = Literal["dense", "attention", "exchange"]
LANES: tuple[Lane, ...] = ("dense", "attention", "exchange")


@dataclass(frozen=True, slots=True)
class Span:
    """One operation of one step: `waited_s` for peers first, then busy for the rest of `seconds`.

    `layer` is -1 where there is none. `start_s` counts from an origin that all spans of one trace
    share.
    """

    rank: Rank
    stream: int
    step: int
    kind: Kind
    layer: int
    start_s: float
    seconds: float
    waited_s: float

    @property
    def lane(self) -> Lane:
        part = part_of(self.kind)
        return part if part in ("dense", "attention") else "exchange"

    @property
    def busy_s(self) -> tuple[float, float]:
        """From when to when the rank was busy with it."""
        return self.start_s + self.waited_s, self.end_s

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


def window(spans: Iterable[Span], start_s: float, stop_s: float) -> list[Span]:
    """What of `spans` falls into a window, cut at its edges and counted from its start."""
    kept = []
    for span in spans:
        start, stop = max(span.start_s, start_s), min(span.end_s, stop_s)
        if stop <= start and not start_s <= span.start_s < stop_s:
            continue
        waited = min(max(span.start_s + span.waited_s - start, 0.0), stop - start)
        kept.append(
            replace(span, start_s=start - start_s, seconds=stop - start, waited_s=waited)
        )  # fmt: skip
    return kept


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Sorted, disjoint intervals that cover the same time."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(intervals):
        if stop <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged


def idle(spans: Sequence[Span], start_s: float, stop_s: float) -> list[tuple[float, float]]:
    """When, between the two times, none of `spans` (of one rank) was busy."""
    gaps, at = [], start_s
    for start, stop in union(span.busy_s for span in spans):
        if start > at:
            gaps.append((at, min(start, stop_s)))
        at = max(at, stop)
        if at >= stop_s:
            return gaps
    return [*gaps, (at, stop_s)]


def busy_ratio(spans: Sequence[Span], lane: Lane, seconds: float) -> float:
    """Share of `seconds` in which `spans` (of one rank) were busy in `lane`."""
    busy = union(span.busy_s for span in spans if span.lane == lane)
    return sum(stop - start for start, stop in busy) / seconds if seconds else 0.0
