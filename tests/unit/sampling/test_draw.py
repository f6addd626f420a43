import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.sampling.draw import WEIGHT_ONE, Head, HeadTooShort, draw
from tknp.sampling.params import SamplingParams
from tknp.sampling.random import uniform

tails = st.lists(st.integers(1, WEIGHT_ONE), max_size=30)
params = st.builds(
    SamplingParams,
    temperature=st.just(1.0),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**64 - 1),
)


def head(weights: list[int], length: int) -> Head:
    ids = np.arange(len(weights), dtype=np.int64) + 100
    array = np.array(weights, dtype=np.int64)
    complete = length == len(weights)
    return Head(ids[:length], array[:length], sum(weights), complete)


@settings(deadline=None)
@given(tails, params, st.integers(0, 10**6))
def test_a_shorter_head_gives_the_same_token_or_says_that_it_cannot(
    tail: list[int], p: SamplingParams, position: int
) -> None:
    weights = [WEIGHT_ONE, *sorted(tail, reverse=True)]
    token = draw(head(weights, len(weights)), p, position)
    for length in range(1, len(weights)):
        try:
            assert draw(head(weights, length), p, position) == token
        except HeadTooShort:
            continue


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, 4),
        ({"top_k": 2}, 2),
        ({"top_k": 9}, 4),
        ({"top_p": 0.5}, 1),  # the likeliest alone holds 8/16
        ({"top_p": 0.5000001}, 2),
        ({"top_p": 0.75}, 2),
        ({"top_p": 0.76}, 3),
        ({"min_p": 0.5}, 2),
        ({"min_p": 0.25}, 4),
        ({"min_p": 1.0}, 1),
        # top-p counts mass among what top-k kept: 8/12 of it is the first.
        ({"top_k": 2, "top_p": 0.66}, 1),
        ({"top_k": 2, "top_p": 0.67}, 2),
        ({"top_p": 0.76, "min_p": 0.5}, 2),
    ],
)
def test_what_each_limit_keeps(changes: dict[str, float], kept: int) -> None:
    weights = [WEIGHT_ONE, WEIGHT_ONE // 2, WEIGHT_ONE // 4, WEIGHT_ONE // 4]
    p = SamplingParams(temperature=1.0, seed=3, **changes)
    drawn = {draw(head(weights, 4), p, position) for position in range(300)}
    assert drawn == set(range(100, 100 + kept))


def test_a_head_without_the_mass_asked_for_is_too_short() -> None:
    weights = [WEIGHT_ONE] * 10
    for changes in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}):
        with pytest.raises(HeadTooShort):
            draw(head(weights, 4), SamplingParams(temperature=1.0, **changes), 0)


def test_a_head_that_holds_the_top_k_needs_no_more() -> None:
    p = SamplingParams(temperature=1.0, top_k=4, top_p=1.0, min_p=0.5)
    drawn = {draw(head([WEIGHT_ONE] * 10, 4), p, position) for position in range(100)}
    assert drawn == {100, 101, 102, 103}


def test_a_target_on_a_boundary_belongs_to_the_next_token() -> None:
    # Weights of 1 put every target on a boundary.
    p = SamplingParams(temperature=1.0, seed=9)
    for position in range(50):
        assert draw(head([1, 1, 1, 1], 4), p, position) == 100 + int(uniform(9, position) * 4)
