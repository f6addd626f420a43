"""Several runs that differ in load only, and the search for the highest rate that keeps an SLO."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tknp_loadgen.errors import InputError
from tknp_loadgen.measure.percentile import wilson

MOST_TRIES = 4  # of one rate, each with another seed
Probe = Callable[[float, int], tuple[int, int]]  # rate, try -> good, scheduled


@dataclass
class Verdict:
    """What is known about one rate."""

    rate: float
    good: int = 0
    scheduled: int = 0
    tries: int = 0
    passed: bool = False
    confident: bool = False

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.good, self.scheduled)


@dataclass
class Search:
    """`passed`: the highest rate known to keep the SLO (None: not even the lowest); `failed`: the
    lowest known not to (None: even the highest does)."""

    target: float
    passed: float | None = None
    failed: float | None = None
    verdicts: list[Verdict] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        return {
            "target_ratio": self.target, "highest_rate_met_per_s": self.passed,
            "lowest_rate_missed_per_s": self.failed,
            "confident": all(verdict.confident for verdict in self.verdicts),
            "rates": [
                {"rate_per_s": v.rate, "good": v.good, "scheduled": v.scheduled,
                 "tries": v.tries, "met": v.passed, "confident": v.confident,
                 "ci_low": v.interval[0], "ci_high": v.interval[1]}
                for v in self.verdicts
            ],
        }  # fmt: skip


def judge(probe: Probe, rate: float, target: float, most_tries: int = MOST_TRIES) -> Verdict:
    """Probe until the interval of the share is clear of `target`, or tries run out.

    Then the share itself decides, and the verdict says that it is not a confident one.
    """
    verdict = Verdict(rate)
    while verdict.tries < most_tries:
        good, scheduled = probe(rate, verdict.tries)
        verdict.good += good
        verdict.scheduled += scheduled
        verdict.tries += 1
        low, high = verdict.interval
        if low >= target or high < target:
            verdict.confident = True
            break
    verdict.passed = verdict.good >= target * verdict.scheduled > 0
    return verdict


def search(
    probe: Probe, low: float, high: float, target: float, precision: float = 0.1,
    most_tries: int = MOST_TRIES,
) -> Search:  # fmt: skip
    """Bisect between two rates, by ratio, until they are within 1 + `precision`."""
    if not 0 < low < high or precision <= 0:
        raise InputError("search", f"{low}:{high}", "write LOW:HIGH, both above 0; precision too")
    found = Search(target)

    def passes(rate: float) -> bool:
        verdict = judge(probe, rate, target, most_tries)
        found.verdicts.append(verdict)
        if verdict.passed:
            found.passed = rate
        else:
            found.failed = rate
        return verdict.passed

    if not passes(low) or passes(high):
        return found
    while high / low > 1 + precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if passes(middle) else (low, middle)
    found.passed, found.failed = low, high
    return found
