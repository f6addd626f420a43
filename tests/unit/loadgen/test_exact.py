"""Exact draws: close to the real functions, and the same bits wherever they run."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest

from tknp_loadgen.exact import Draws, cos_turns, exp, ln


def test_functions_are_close_to_the_real_ones() -> None:
    x = np.concatenate([np.geomspace(1e-300, 1e300, 2001), 1 + np.linspace(-1e-3, 1e-3, 101)])
    true = np.array([math.log(value) for value in x])
    assert np.allclose(ln(x), true, rtol=2e-15, atol=1e-18)
    y = np.linspace(-600, 600, 2001)
    assert np.allclose(exp(y), [math.exp(value) for value in y], rtol=2e-15, atol=0)
    turns = np.linspace(-3, 3, 2001)
    assert np.allclose(cos_turns(turns), np.cos(2 * np.pi * turns), rtol=0, atol=1e-13)


def test_bits_never_change() -> None:
    """Recorded once; a difference here means that published trace hashes no longer hold."""
    draws = Draws(7, 1)
    parts = [
        draws.bits(100), draws.unit(100), draws.exponential(100), draws.normal(100),
        draws.gamma(0.3, 100), draws.gamma(3.0, 100), draws.below(1000, 100), draws.order(100),
    ]  # fmt: skip
    digest = hashlib.sha256(b"".join(part.astype(part.dtype.newbyteorder("<")).tobytes()
                                     for part in parts)).hexdigest()  # fmt: skip
    assert digest == "c05ad3bad38e5ca57e8ffc9b9ae3c28d1aed389212b100e3a35f7068df02659e"


def test_paths_and_seeds_are_independent() -> None:
    first = Draws(7, 1).unit(4000)
    for other in (Draws(7, 2), Draws(8, 1), Draws(7, 1, 0)):
        correlation = np.corrcoef(first, other.unit(4000))[0, 1]
        assert abs(correlation) < 0.05


@pytest.mark.parametrize("shape", [0.2, 1.0, 4.0])
def test_moments(shape: float) -> None:
    draws = Draws(3, 9)
    gamma = draws.gamma(shape, 40_000)
    assert gamma.mean() == pytest.approx(shape, rel=0.05)
    assert gamma.var() == pytest.approx(shape, rel=0.1)
    normal = draws.normal(40_000)
    assert abs(normal.mean()) < 0.02
    assert normal.std() == pytest.approx(1, abs=0.02)
    assert sorted(draws.order(50)) == list(range(50))
