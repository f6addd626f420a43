"""The mixed-length workload of the TKNP paper (section 5.1), from its published statistics.

The paper's requests are not published, its statistics are: 8,223 to 126,848 input tokens, mean
32,898, median 19,048, standard deviation 28,496, 12.5% above 64K with 36.1% of the tokens, and
57.2% of the tokens in the longest quarter. These 128 lengths were fitted to them (mean and extremes
exactly, the others within 0.01%). Repeating them keeps every statistic, so any multiple of 128
requests has them; the standard deviation is that of the whole population.
"""

from __future__ import annotations

import numpy as np

from tknp_loadgen.errors import InputError
from tknp_loadgen.exact import Draws, Integers

STREAM = 2
OUTPUT_TOKENS = 1024
LENGTHS = (
    8223, 8371, 8455, 8540, 8626, 8712, 8800, 8888, 8914, 8925, 8937, 8949, 8960, 8972, 8983,
    8995, 9007, 9018, 9030, 9176, 9649, 10147, 10671, 11222, 11802, 12412, 13053, 13727, 14436,
    15182, 15967, 16792, 17232, 17255, 17279, 17303, 17326, 17350, 17374, 17397, 17421, 17445,
    17469, 17492, 17516, 17540, 17564, 17588, 17612, 17636, 17658, 17708, 17811, 17915, 18019,
    18124, 18230, 18336, 18442, 18550, 18658, 18767, 18876, 18958, 19138, 19328, 19522, 19718,
    19915, 20115, 20317, 20520, 20726, 20934, 21144, 21356, 21570, 21787, 22005, 22356, 23539,
    24786, 26098, 27480, 28935, 30467, 32081, 33780, 35569, 37453, 39437, 41526, 43725, 46041,
    48480, 51048, 52226, 52436, 52648, 52860, 53073, 53287, 53555, 54308, 55073, 55847, 56633,
    57430, 58238, 59057, 59888, 61947, 71125, 73876, 75124, 76391, 77678, 78985, 80312, 83951,
    90627, 97798, 105500, 113774, 120357, 122706, 125098, 126848,
)  # fmt: skip


def paper_mixed(count: int, seed: int) -> Integers:
    """`count` input lengths in random order. Raises InputError unless a multiple of 128."""
    if count <= 0 or count % len(LENGTHS):
        near = max(1, round(count / len(LENGTHS))) * len(LENGTHS)
        raise InputError(
            "num_prompts", count, f"the mixed workload comes in multiples of 128, such as {near}"
        )
    repeated = np.tile(np.array(LENGTHS, np.int64), count // len(LENGTHS))
    return repeated[Draws(seed, STREAM).order(count)]
