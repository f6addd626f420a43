"""Arrival processes: their distributions, with fixed seeds."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from tknp_loadgen.errors import InputError
from tknp_loadgen.trace.arrivals import Arrivals
from tknp_loadgen.trace.curve import RateCurve, diurnal, piecewise, ramp

COUNT = 5000


def gaps_s(arrivals: Arrivals, count: int = COUNT, seed: int = 7) -> np.ndarray:
    return np.diff(arrivals.times_us(count, seed), prepend=0) / 1e6


def kolmogorov_smirnov(samples: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """sqrt(n) D: above 1.63 happens to one sample in a hundred of the right distribution."""
    ordered = np.sort(samples)
    expected = cdf(ordered)
    steps = np.arange(len(ordered) + 1) / len(ordered)
    distance = max((steps[1:] - expected).max(), (expected - steps[:-1]).max())
    return float(distance * math.sqrt(len(ordered)))


def dispersion(times_s: np.ndarray, width_s: float) -> float:
    """Variance over mean of the counts in windows: 1 for Poisson."""
    counts, _ = np.histogram(times_s, np.arange(0, times_s[-1], width_s))
    return float(counts.var() / counts.mean())


def exponential(rate: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: 1 - np.exp(-rate * x)


def test_poisson() -> None:
    """Five in a hundred samples of the right distribution are above 1.36."""
    distances = [
        kolmogorov_smirnov(gaps_s(Arrivals("poisson", rate=20), 500, seed), exponential(20))
        for seed in range(200)
    ]
    assert 0.01 < np.mean(np.array(distances) > 1.36) < 0.09
    gaps = gaps_s(Arrivals("poisson", rate=20))
    assert dispersion(np.cumsum(gaps), 1.0) == pytest.approx(1, abs=0.25)
    assert gaps.max() * 20 > 6  # nothing is clipped: a peer cuts gaps at three means
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.04


def test_the_span_is_not_rescaled() -> None:
    """A peer stretches every draw to last exactly N / rate; real spans vary by 1/sqrt(N)."""
    spans = np.array([gaps_s(Arrivals("poisson", rate=1), 200, seed).sum() for seed in range(60)])
    assert spans.std() / spans.mean() == pytest.approx(0.07, abs=0.02)


def test_constant_is_constant() -> None:
    """A peer's 'constant' load has Poisson gaps."""
    gaps = gaps_s(Arrivals("constant", rate=8))[1:]
    assert gaps.std() == pytest.approx(0, abs=1e-6)
    assert gaps.mean() == pytest.approx(1 / 8)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_has_the_rate_and_the_burstiness_asked_for(burstiness: float) -> None:
    gaps = gaps_s(Arrivals("gamma", rate=20, burstiness=burstiness), 20_000)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)
    assert dispersion(np.cumsum(gaps), 10.0) == pytest.approx(1 / burstiness, rel=0.35)


def test_bursts() -> None:
    assert not Arrivals("burst").times_us(128, 7).any()
    train = Arrivals("burst-train", burst_size=4, burst_interval_s=2.5).times_us(10, 7)
    assert train.tolist() == [0] * 4 + [2_500_000] * 4 + [5_000_000] * 2


CURVES = {
    "linear ramp": (Arrivals("ramp", rate=1, final_rate=40, duration_s=200),
                    ramp(1, 40, 200, "linear")),
    "exponential ramp": (
        Arrivals("ramp", rate=1, final_rate=40, duration_s=200, shape="exponential"),
        ramp(1, 40, 200, "exponential")),
    "piecewise": (Arrivals("piecewise", pieces=((5.0, 60.0), (0.0, 30.0), (40.0, 10.0))),
                  piecewise(((5, 60), (0, 30), (40, 10)))),
    "diurnal": (Arrivals("diurnal", rate=10, swing=0.9, period_s=100),
                diurnal(10, 0.9, 100, 1000)),
}  # fmt: skip


@pytest.mark.parametrize("name", CURVES)
def test_changing_rates(name: str) -> None:
    """Through the integral of the rate, arrivals become a Poisson process of rate 1."""
    arrivals, curve = CURVES[name]
    times = arrivals.times_us(2000, 7) / 1e6
    unit = np.array([curve.integral(time) for time in times])
    assert kolmogorov_smirnov(np.diff(unit, prepend=0), exponential(1)) < 1.63


def test_no_arrival_where_the_rate_is_zero() -> None:
    times = CURVES["piecewise"][0].times_us(2000, 7) / 1e6
    assert not ((times > 60.001) & (times < 89.999)).any()


def test_a_curve_inverts_its_integral() -> None:
    curve = RateCurve(((0, 2), (10, 8), (10, 1), (20, 1), (40, 0.5)))
    counts = np.linspace(0.01, 100, 500)
    times = curve.invert(counts)
    assert np.allclose([curve.integral(time) for time in times], counts, rtol=1e-12)


def test_a_diurnal_wave_is_lowest_at_its_start() -> None:
    times = CURVES["diurnal"][0].times_us(4000, 7) / 1e6
    phase = times % 100
    assert ((phase > 25) & (phase < 75)).mean() > 0.7


def test_a_closed_loop_has_users_and_pauses() -> None:
    arrivals = Arrivals("closed", users=4, think_s=2.0)
    extras = arrivals.extras(4000, 7)
    assert [extra["user"] for extra in extras[:6]] == [0, 1, 2, 3, 0, 1]
    pauses = np.array([extra["think_s"] for extra in extras[4:]])
    assert kolmogorov_smirnov(pauses, exponential(0.5)) < 1.63


def test_counts_for_a_duration() -> None:
    assert Arrivals("poisson", rate=3).expected_count(60) == 180
    assert CURVES["linear ramp"][0].expected_count(200) == 4100
    with pytest.raises(InputError, match="num-prompts"):
        Arrivals("burst").expected_count(10)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "sometimes"}, {"kind": "poisson", "rate": 0}, {"kind": "gamma", "burstiness": -1},
        {"kind": "burst-train"}, {"kind": "ramp", "final_rate": 2}, {"kind": "piecewise"},
        {"kind": "closed"}, {"kind": "diurnal", "swing": 2.0},
        {"kind": "poisson", "rate": float("inf")},
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError):
        Arrivals(**wrong)  # type: ignore[arg-type]
