"""Random draws and functions that give the same bits on every machine.

A trace is named by its hash, so a seed has to give the same bytes wherever it is used. NumPy
promises that of PCG64's raw bits and of SeedSequence, but not of its distributions, and libm's log,
exp and cos differ between systems in the last bit. Here everything beyond raw bits is made of
operations that IEEE 754 rounds exactly: + - * / sqrt, frexp and ldexp, one at a time (NumPy never
fuses two of them). Sums that reach a file are of integers, since NumPy's float sums depend on SIMD.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_LN2: Final = 0.6931471805599453
_LN2_HIGH: Final = 0.6931471803691238  # ln 2 in two parts: k * _LN2_HIGH is exact for small k
_LN2_LOW: Final = 1.9082149292705877e-10
_SQRT_HALF: Final = 0.7071067811865476
_TWO_PI: Final = 6.283185307179586


def ln(x: Floats) -> Floats:
    """Natural logarithm of positive, normal numbers; relative error below 1e-15."""
    mantissa, exponent = np.frexp(x)
    low = mantissa < _SQRT_HALF
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    power = (exponent - low).astype(np.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # ln m = 2 (s + s^3/3 + s^5/5 + ...), |s| < 0.172
    square = s * s
    series = np.full_like(s, 1.0 / 23.0)
    for odd in range(21, 0, -2):
        series = series * square + 1.0 / odd
    return power * _LN2_HIGH + (2.0 * s * series + power * _LN2_LOW)


def exp(x: Floats) -> Floats:
    """e to the x for |x| < 700; relative error below 1e-15."""
    power = np.rint(x / _LN2)
    rest = (x - power * _LN2_HIGH) - power * _LN2_LOW
    series = np.ones_like(rest)
    for term in range(16, 0, -1):
        series = 1.0 + rest * series / term
    return np.ldexp(series, power.astype(np.int32))


def cos_turns(turns: Floats) -> Floats:
    """Cosine of an angle given in whole turns; absolute error below 1e-14."""
    phase = turns - np.rint(turns)  # -0.5 .. 0.5
    angle = _TWO_PI * phase
    square = angle * angle
    series = np.ones_like(square)
    for term in range(34, 0, -2):
        series = 1.0 - square * series / (term * (term - 1))
    return series


class Draws:
    """An endless sequence of draws named by a seed and a path of integers.

    Different paths are independent, so that changing how lengths are drawn leaves arrivals alone.
    """

    def __init__(self, seed: int, *path: int) -> None:
        self._source = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=path))

    def bits(self, count: int) -> NDArray[np.uint64]:
        return self._source.random_raw(count)

    def unit(self, count: int) -> Floats:
        """Uniform in the open interval (0, 1)."""
        return ((self.bits(count) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52

    def below(self, bound: int, count: int) -> Integers:
        """Uniform integers in 0 .. bound - 1, for bounds up to 2^32."""
        high = self.bits(count) >> np.uint64(32)
        return ((high * np.uint64(bound)) >> np.uint64(32)).astype(np.int64)

    def exponential(self, count: int) -> Floats:
        """Mean 1."""
        return -ln(self.unit(count))

    def normal(self, count: int) -> Floats:
        """Mean 0, standard deviation 1 (Box and Muller)."""
        radius = np.sqrt(-2.0 * ln(self.unit(count)))
        return radius * cos_turns(self.unit(count))

    def gamma(self, shape: float, count: int) -> Floats:
        """Mean `shape` (Marsaglia and Tsang, 2000); below 1 by their power of a uniform."""
        boosted = shape + 1.0 if shape < 1.0 else shape
        d = boosted - 1.0 / 3.0
        c = 1.0 / math.sqrt(9.0 * d)
        accepted: list[Floats] = []
        missing = count
        while missing > 0:
            x, u = self.normal(missing), self.unit(missing)
            cube = 1.0 + c * x
            v = cube * cube * cube
            safe = np.where(v > 0.0, v, 1.0)
            keep = (v > 0.0) & (ln(u) < 0.5 * x * x + d - d * safe + d * ln(safe))
            accepted.append(d * v[keep])
            missing -= len(accepted[-1])
        result = np.concatenate(accepted) if accepted else np.empty(0)
        return result * exp(ln(self.unit(count)) / shape) if shape < 1.0 else result

    def order(self, count: int) -> Integers:
        """A permutation of 0 .. count - 1."""
        return np.argsort(self.bits(count), kind="stable").astype(np.int64)
