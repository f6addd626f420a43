"""When to stop a run early: too many errors, or a server that is saturated."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FEWEST_ENDED = 20
WINDOW = 50  # most recent outcomes that decide on saturation
NOT_OUTCOMES = ("cancelled", "interrupted")


@dataclass(frozen=True)
class Totals:
    """Counts of all workers so far. `overdue`: open, and past the SLO already."""

    released: int = 0
    open: int = 0
    ended: int = 0
    failed: int = 0
    good: int = 0
    overdue: int = 0
    tokens: int = 0
    medians: Mapping[str, float | None] = field(default_factory=dict)


def total(reports: Sequence[Mapping[str, Any]]) -> Totals:
    """Add up workers' progress; medians are the workers' mean, for show."""
    statuses: dict[str, int] = {}
    for report in reports:
        for name, count in report["statuses"].items():
            statuses[name] = statuses.get(name, 0) + count
    ended = sum(count for name, count in statuses.items() if name not in NOT_OUTCOMES)
    medians = {}
    for name in ("lag_ms", "ttft_ms", "tpot_ms"):
        known = [report[name] for report in reports if report.get(name) is not None]
        medians[name] = sum(known) / len(known) if known else None
    sums = {
        name: sum(int(report[name]) for report in reports)
        for name in ("released", "open", "good", "overdue", "tokens")
    }
    return Totals(ended=ended, failed=ended - statuses.get("ok", 0), medians=medians, **sums)


class Watch:
    """Says once why a run should stop: "errors" or "saturated"."""

    def __init__(self, max_error_rate: float | None, saturation_target: float | None) -> None:
        """`saturation_target`: attainment below which the server is saturated; None: never."""
        self._max_error_rate = max_error_rate
        self._target = saturation_target
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._ended = self._good = 0

    def look(self, totals: Totals) -> str | None:
        if (
            self._max_error_rate is not None
            and totals.ended >= FEWEST_ENDED
            and totals.failed > self._max_error_rate * totals.ended
        ):
            return "errors"
        good, bad = totals.good - self._good, totals.ended - self._ended
        self._recent.extend([True] * good + [False] * (bad - good))
        self._ended, self._good = totals.ended, totals.good
        outcomes = [*self._recent, *[False] * totals.overdue][-WINDOW:]
        if self._target is None or len(outcomes) < WINDOW:
            return None
        return "saturated" if sum(outcomes) < self._target * len(outcomes) else None
