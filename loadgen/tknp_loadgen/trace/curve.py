"""Arrival rates that change with time, and Poisson arrivals along them.

A curve is a list of knots (time, rate) joined by straight lines; two knots at one time are a jump.
Arrivals of a Poisson process with rate r(t) are a unit-rate process mapped through the inverse of
R(t), the integral of r. R is quadratic between knots, so the inverse needs a square root only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tknp_loadgen.errors import InputError
from tknp_loadgen.exact import Floats, cos_turns, exp, ln

SMOOTH_KNOTS = 96  # straight pieces that stand for a smooth curve; each is within 0.1% of it


@dataclass(frozen=True)
class RateCurve:
    """Knots in order of time, from 0; the last rate holds for ever after."""

    knots: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        times = [time for time, _ in self.knots]
        if not self.knots or times[0] != 0 or times != sorted(times):
            raise InputError("rates", self.knots, "times must start at 0 and not go back")
        if any(rate < 0 for _, rate in self.knots) or self.knots[-1][1] <= 0:
            raise InputError("rates", self.knots, "rates can't be negative, nor the last one 0")

    def integral(self, until_s: float) -> float:
        """Expected arrivals in 0 .. until_s."""
        total = 0.0
        for (start, low), (stop, high) in zip(self.knots, self.knots[1:], strict=False):
            if until_s <= start:
                break
            width = min(stop, until_s) - start
            if stop > start:
                end = low + (high - low) * (width / (stop - start))
                total += 0.5 * (low + end) * width
        last, rate = self.knots[-1]
        return total + max(0.0, until_s - last) * rate

    def invert(self, counts: Floats) -> Floats:
        """The times at which the integral reaches `counts` (ascending)."""
        times = np.array([time for time, _ in self.knots])
        rates = np.array([rate for _, rate in self.knots])
        widths = times[1:] - times[:-1]
        areas = 0.5 * (rates[1:] + rates[:-1]) * widths
        reached = [0.0]
        for area in areas.tolist():
            reached.append(reached[-1] + area)
        piece = np.searchsorted(np.array(reached), counts, side="right") - 1
        rest = counts - np.array(reached)[piece]
        low = rates[piece]
        rise = np.append(rates[1:] - rates[:-1], 0.0)
        slope = rise[piece] / np.append(np.where(widths > 0, widths, 1.0), 1.0)[piece]
        # rest = low d + slope d^2 / 2, solved in the form that stays exact as slope goes to 0
        root = np.sqrt(np.maximum(low * low + 2.0 * slope * rest, 0.0))
        below = low + root
        result: Floats = times[piece] + 2.0 * rest / np.where(below > 0, below, 1.0)
        return result


def ramp(start: float, stop: float, duration_s: float, shape: str) -> RateCurve:
    """From one rate to another, `linear` or `exponential`, then on at the second."""
    if shape == "linear":
        return RateCurve(((0.0, start), (duration_s, stop)))
    if start <= 0 or stop <= 0:
        raise InputError("request_rate", start, "an exponential ramp needs rates above 0")
    share = np.arange(SMOOTH_KNOTS + 1) / SMOOTH_KNOTS
    growth = ln(np.array([stop / start]))
    rates = start * exp(share * growth)
    return RateCurve(tuple(zip((share * duration_s).tolist(), rates.tolist(), strict=True)))


def piecewise(pieces: Sequence[tuple[float, float]]) -> RateCurve:
    """Constant rates, each for so many seconds: (rate, seconds) ...; the last one goes on."""
    knots, now = [], 0.0
    for rate, duration_s in pieces:
        knots += [(now, rate), (now + duration_s, rate)]
        now += duration_s
    return RateCurve(tuple(knots))


def diurnal(mean: float, swing: float, period_s: float, length_s: float) -> RateCurve:
    """mean (1 - swing cos(2 pi t / period)): lowest at 0, highest half a period later."""
    count = SMOOTH_KNOTS * max(1, int(-(-length_s // period_s)))
    turns = np.arange(count + 1) / SMOOTH_KNOTS
    rates = mean * (1.0 - swing * cos_turns(turns))
    return RateCurve(tuple(zip((turns * period_s).tolist(), rates.tolist(), strict=True)))
