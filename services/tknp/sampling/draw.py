"""The draw of one row: inverse CDF over integer weights. Pure Python and numpy.

A token's weight is its probability relative to the likeliest token's, as an integer out of 2**40.
Integer sums are exact in any order, so the result cannot depend on how a sum was cut over rows,
threads or devices, and the head of the descending order gives the same token as all of it.

    weights    |--------------|--------|------|---|--|-|.......
               likeliest                               tail: known only by its total mass
    kept       |<- shortest of top-k, top-p, min-p ->|
    target     uniform * mass kept: the token under it is drawn
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from tknp.sampling.history import Int64Array
from tknp.sampling.params import SamplingParams
from tknp.sampling.random import UNIFORM_BITS, uniform_bits

WEIGHT_ONE: Final = 2**40
"""Weight of the likeliest token. What rounds to 0 is less likely than it by more than 2**40."""


@dataclass(frozen=True, slots=True)
class Head:
    """The likeliest tokens of a row, descending, ties by ascending id.

    ids, weights: [n]. `total` is the weight of the whole vocabulary. `complete`: every token of
    weight above 0 is here.
    """

    ids: Int64Array
    weights: Int64Array
    total: int
    complete: bool


class HeadTooShort(LookupError):
    """The draw needs tokens beyond an incomplete head; a complete one always suffices."""


def draw(head: Head, params: SamplingParams, position: int) -> int:
    """Token id for `position`; raises HeadTooShort where more of the order is needed.

    top-k, then top-p of what top-k kept, then min-p; each always keeps the likeliest token.
    """
    cumulative = np.cumsum(head.weights)
    kept, mass = len(head.ids), head.total
    closed = head.complete  # `kept` tokens are all there are; the tail is out
    if params.top_k and params.top_k <= kept:
        kept, closed = params.top_k, True
        mass = int(cumulative[kept - 1])
    elif params.top_k and not closed:
        raise HeadTooShort
    if params.top_p < 1.0:
        share, scale = float(params.top_p).as_integer_ratio()
        enough = -(-share * mass // scale)
        count = int(cumulative[:kept].searchsorted(enough)) + 1
        if count > kept:
            raise HeadTooShort
        kept, closed = count, True
        mass = int(cumulative[kept - 1])
    if params.min_p > 0.0:
        share, scale = float(params.min_p).as_integer_ratio()
        least = -(-share * WEIGHT_ONE // scale)
        count = int(np.count_nonzero(head.weights[:kept] >= least))
        if count == kept and not closed:
            raise HeadTooShort
        if count < kept:
            kept = count
            mass = int(cumulative[kept - 1])
    bits = uniform_bits(params.seed, position)
    target = mass * (2 * bits + 1) >> (UNIFORM_BITS + 1)
    at = int(cumulative[:kept].searchsorted(target, side="right"))
    if at == kept:
        raise HeadTooShort
    return int(head.ids[at])
