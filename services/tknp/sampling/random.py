"""A uniform number for every (seed, position), the same on every machine.

Philox4x64-10 (Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC 2011): a keyed bijection of a 256-bit counter, without state. The seed is the key, the position
the counter, so a draw needs neither earlier draws nor the batch it is part of:

    key      (seed, 0)
    counter  (position, 0, 0, 0)   the other words are free for further streams
    result   the top 52 bits of the first output word

Exact integer arithmetic only; independent of the versions of torch and numpy.
"""

from __future__ import annotations

from typing import Final

UNIFORM_BITS: Final = 52
"""52 bits, not 53: (2 bits + 1) / 2**53 is then exact in a double and strictly inside (0, 1)."""

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10

Block = tuple[int, int, int, int]


def philox4x64(counter: Block, key: tuple[int, int]) -> Block:
    """One block of Philox4x64-10: four 64-bit words from a counter of four and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0 = _MULTIPLIERS[0] * c0
        p1 = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & _MASK, (p0 >> 64) ^ c3 ^ k1, p0 & _MASK
        k0 = (k0 + _WEYL[0]) & _MASK
        k1 = (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform_bits(seed: int, position: int) -> int:
    """Integer r in [0, 2**52) for the token at `position`; the uniform number is (2r+1) / 2**53."""
    return philox4x64((position, 0, 0, 0), (seed, 0))[0] >> (64 - UNIFORM_BITS)


def uniform(seed: int, position: int) -> float:
    """`uniform_bits` as a double strictly between 0 and 1."""
    return (2 * uniform_bits(seed, position) + 1) / float(2 ** (UNIFORM_BITS + 1))
