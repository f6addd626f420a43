import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.sampling.order import descending, first_maximum

FEW = st.sampled_from([-math.inf, -2.5, -0.0, 0.0, 1e-45, 1.0, 3e38, math.inf])
matrices = st.integers(1, 9).flatmap(
    lambda v: st.lists(st.lists(FEW, min_size=v, max_size=v), min_size=1, max_size=5)
)


@settings(deadline=None)
@given(matrices, st.integers(0, 2**32 - 1))
def test_descending_equals_a_stable_sort(matrix: list[list[float]], seed: int) -> None:
    keys = torch.tensor(matrix, dtype=torch.float32)
    mask = torch.from_numpy(np.random.default_rng(seed).random(keys.shape) < 0.6)
    values = torch.arange(keys.numel()).reshape(keys.shape) * 10
    found = descending(mask, keys, values)
    assert len(found) == len(matrix)
    for row, (ids, at) in enumerate(found):
        expected = sorted(
            (i for i in range(keys.shape[1]) if mask[row, i]), key=lambda i: -matrix[row][i]
        )
        assert ids.tolist() == expected
        assert at.tolist() == [int(values[row, i]) for i in expected]


@settings(deadline=None)
@given(matrices)
def test_first_maximum_is_the_lowest_id(matrix: list[list[float]]) -> None:
    ids, peaks = first_maximum(torch.tensor(matrix, dtype=torch.float32))
    for row, token, peak in zip(matrix, ids, peaks, strict=True):
        assert token == row.index(max(row))
        assert peak == torch.tensor(max(row), dtype=torch.float32).item()


def test_nan_is_the_maximum() -> None:
    ids, peaks = first_maximum(torch.tensor([[1.0, math.inf, math.nan, math.nan], [0, 1, 2, 3]]))
    assert ids == [2, 3]
    assert math.isnan(peaks[0])
    assert peaks[1] == 3.0
