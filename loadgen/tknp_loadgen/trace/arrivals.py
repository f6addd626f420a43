"""When requests arrive: every process draws its whole schedule before the run.

Nothing is rescaled to hit the mean rate exactly, clipped, or drawn by several workers: the span of
N Poisson arrivals varies by 1/sqrt(N), as it should.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tknp_loadgen.errors import InputError
from tknp_loadgen.exact import Draws, Floats, Integers
from tknp_loadgen.trace.curve import RateCurve, diurnal, piecewise, ramp
from tknp_loadgen.trace.format import MICRO

STREAM = 1  # of Draws, apart from lengths and prompts
KINDS = (
    "constant", "poisson", "gamma", "burst", "burst-train", "ramp", "piecewise", "diurnal",
    "closed",
)  # fmt: skip


@dataclass(frozen=True)
class Arrivals:
    """One arrival process. Rates are requests a second.

    constant      every 1 / rate
    poisson       exponential gaps
    gamma         gaps of shape `burstiness`: 1 is Poisson, less is burstier
    burst         all at once
    burst-train   `burst_size` at once, every `burst_interval_s`
    ramp          Poisson, from `rate` to `final_rate` over `duration_s`, then on
    piecewise     Poisson, `pieces` of (rate, seconds), the last one goes on
    diurnal       Poisson around `rate`, a wave of relative height `swing` every `period_s`
    closed        `users` who each send, wait for the answer, think for about `think_s`, send again
    """

    kind: str
    rate: float = 1.0
    burstiness: float = 1.0
    burst_size: int = 0
    burst_interval_s: float = 0.0
    final_rate: float = 0.0
    shape: str = "linear"
    duration_s: float = 0.0
    pieces: Sequence[tuple[float, float]] = ()
    swing: float = 0.5
    period_s: float = 86400.0
    users: int = 0
    think_s: float = 0.0

    def __post_init__(self) -> None:
        needed: dict[str, Sequence[str]] = {
            "constant": ("rate",), "poisson": ("rate",), "gamma": ("rate", "burstiness"),
            "burst": (), "burst-train": ("burst_size", "burst_interval_s"),
            "ramp": ("final_rate", "duration_s"), "piecewise": ("pieces",),
            "diurnal": ("rate", "period_s"), "closed": ("users",),
        }  # fmt: skip
        if self.kind not in needed:
            raise InputError("arrivals", self.kind, f"must be one of {', '.join(KINDS)}")
        for name in needed[self.kind]:
            value = getattr(self, name)
            if not value or (isinstance(value, int | float) and not 0 < value < float("inf")):
                raise InputError(name, value, f"{self.kind} arrivals need a value above 0")
        if not 0 <= self.swing < 1 or self.think_s < 0 or self.rate < 0:
            raise InputError("swing, think_s, rate", (self.swing, self.think_s, self.rate),
                             "swing is in 0..1, the others can't be negative")  # fmt: skip

    def describe(self) -> Mapping[str, Any]:
        """What the header says: the fields that this kind reads."""
        read = {
            "constant": ("rate",), "poisson": ("rate",), "gamma": ("rate", "burstiness"),
            "burst": (), "burst-train": ("burst_size", "burst_interval_s"),
            "ramp": ("rate", "final_rate", "shape", "duration_s"), "piecewise": ("pieces",),
            "diurnal": ("rate", "swing", "period_s"), "closed": ("users", "think_s"),
        }[self.kind]  # fmt: skip
        values = asdict(self)
        return {"kind": self.kind, **{name: values[name] for name in read}}

    def times_us(self, count: int, seed: int) -> Integers:
        """Microseconds after release of `count` arrivals, ascending."""
        draws = Draws(seed, STREAM)
        if self.kind in ("burst", "closed"):
            return np.zeros(count, np.int64)
        if self.kind == "burst-train":
            bursts = np.arange(count) // self.burst_size
            return _microseconds(bursts * self.burst_interval_s)
        if self.kind == "constant":
            return _microseconds(np.arange(count) / self.rate)
        if self.kind in ("poisson", "gamma"):
            shape = self.burstiness if self.kind == "gamma" else 1.0
            gaps = draws.exponential(count) if shape == 1.0 else draws.gamma(shape, count) / shape
            times: Integers = np.cumsum(_microseconds(gaps / self.rate))
            return times
        unit = np.cumsum(_nano(draws.exponential(count))) / 1e9
        return _microseconds(self._curve(count).invert(unit))

    def _curve(self, count: int) -> RateCurve:
        if self.kind == "ramp":
            return ramp(self.rate, self.final_rate, self.duration_s, self.shape)
        if self.kind == "piecewise":
            return piecewise(self.pieces)
        return diurnal(self.rate, self.swing, self.period_s, 2.0 * count / self.rate)

    def extras(self, count: int, seed: int) -> list[dict[str, Any]]:
        """Rows' users and thinking times, in a closed loop; exponential around `think_s`."""
        if self.kind != "closed":
            return []
        think = _microseconds(Draws(seed, STREAM).exponential(count) * self.think_s)
        return [
            {"user": row % self.users, "think_s": pause / MICRO if row >= self.users else 0.0}
            for row, pause in enumerate(think.tolist())
        ]

    def expected_count(self, duration_s: float) -> int:
        """About as many arrivals as `duration_s` holds."""
        if self.kind in ("constant", "poisson", "gamma"):
            return round(self.rate * duration_s)
        if self.kind == "burst-train":
            return self.burst_size * int(duration_s // self.burst_interval_s + 1)
        if self.kind in ("burst", "closed"):
            raise InputError("duration_s", duration_s, f"{self.kind} needs --num-prompts instead")
        curve = self._curve(max(1, round(self.rate * duration_s)))
        return round(curve.integral(duration_s))


def _microseconds(seconds: NDArray[np.floating[Any]]) -> Integers:
    result: Integers = np.rint(seconds * MICRO).astype(np.int64)
    return result


def _nano(values: Floats) -> Integers:
    return np.rint(values * 1e9).astype(np.int64)
