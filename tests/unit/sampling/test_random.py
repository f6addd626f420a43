import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.sampling.random import philox4x64, uniform, uniform_bits

ONES = 2**64 - 1
word = st.integers(0, ONES)


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        (
            (0, 0, 0, 0),
            (0, 0),
            (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
        ),
        (
            (ONES,) * 4,
            (ONES,) * 2,
            (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
        ),
    ],
)
def test_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], block: tuple[int, int, int, int]
) -> None:
    assert philox4x64(counter, key) == block


@settings(deadline=None)
@given(st.tuples(word, word, word, word), st.tuples(word, word))
def test_equals_numpys_philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    # numpy counts up before it generates.
    number = sum(c << (64 * i) for i, c in enumerate(counter))
    before = (number - 1) % 2**256
    theirs = np.random.Philox(
        key=np.array(key, dtype=np.uint64),
        counter=np.array([before >> (64 * i) & ONES for i in range(4)], dtype=np.uint64),
    )
    assert philox4x64(counter, key) == tuple(int(w) for w in theirs.random_raw(4))


@pytest.mark.parametrize(
    ("seed", "position", "bits"),
    [(0, 0, 0x16554D9ECA363), (1, 0, 0xCB7EA744CF19B), (ONES, 131_071, 0x5F2D677A3DD5A)],
)
def test_draws_never_change(seed: int, position: int, bits: int) -> None:
    assert uniform_bits(seed, position) == bits


@settings(deadline=None)
@given(word, st.integers(0, 2**40))
def test_open_interval(seed: int, position: int) -> None:
    u = uniform(seed, position)
    assert 0.0 < u < 1.0
    assert u * 2**53 == 2 * uniform_bits(seed, position) + 1


@pytest.mark.parametrize("along", ["position", "seed"])
def test_uniform_along_positions_and_along_seeds(along: str) -> None:
    n, cells = 20_000, 50
    pairs = ((7, i) if along == "position" else (i, 7) for i in range(n))
    draws = np.array([uniform(*pair) for pair in pairs])
    counts = np.histogram(draws, bins=cells, range=(0, 1))[0]
    chi_square = ((counts - n / cells) ** 2).sum() / (n / cells)
    assert chi_square < 85.4  # 49 degrees of freedom, p = 0.001
    lag_correlation = np.corrcoef(draws[:-1], draws[1:])[0, 1]
    assert abs(lag_correlation) < 3.3 / np.sqrt(n)
