"""What a request needs of several owners, and which limit is named when nobody could hold it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.coordinator.division import Division
from tknp.coordinator.limits import Limits
from tknp.errors import InvalidValue

MakeLimits = Callable[..., Limits]
PAIR = ((0, 1),)


def test_one_owner_where_it_fits_and_as_few_as_hold_it_elsewhere() -> None:
    division = Division(4, ((0, 1, 2),), width=3, interleave=2)
    assert division.fewest_owners([8, 8, 8], 5, 32) == 1
    assert division.fewest_owners([8, 8, 8], 5, 33) == 2
    assert division.fewest_owners([8, 8, 8], 70, 80) == 3
    assert division.fewest_owners([8, 8, 8], 5, 97) is None
    assert Division(4, ((0, 1, 2),), width=2).fewest_owners([8, 8, 8], 70, 80) is None


def test_the_smallest_of_the_owners_limits_what_they_share() -> None:
    division = Division(4, PAIR, width=2)
    assert division.fewest_owners([8, 3], 20, 24) == 1
    assert division.fewest_owners([5, 4], 20, 24) == 2
    assert division.fewest_owners([5, 2], 20, 24) is None


def test_together_means_all_owners_of_the_stream() -> None:
    division = Division(4, PAIR, width=2, together=True, interleave=2)
    assert division.fewest_owners([8, 8], 1, 3) == 2
    assert division.pages((0, 1), division.shares((0, 1), 1), 3) == [1, 1]
    assert division.fewest_owners([8, 0], 1, 3) is None


def test_owners_of_layers_keep_every_token() -> None:
    division = Division(4, PAIR, together=True, divides="layers")
    shares = division.shares((0, 1), 9)
    assert shares.owners == (0,)
    assert division.pages((0, 1), shares, 10) == [3, 3]
    assert division.covered(shares, [3, 5], 40) == 12
    assert division.fewest_owners([8, 2], 9, 10) is None


def test_prompts_are_cut_at_pages() -> None:
    division = Division(4, ((0, 1, 2),), width=3)
    shares = division.shares((0, 1, 2), 21)
    assert [shares.prompt_span(i) for i in range(3)] == [range(8), range(8, 16), range(16, 21)]


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 60), output=st.integers(1, 60), owners=st.integers(1, 4),
    interleave=st.integers(1, 9), spare=st.lists(st.integers(0, 2), min_size=4, max_size=4),
)  # fmt: skip
def test_covered_is_the_first_position_without_a_slot(
    prompt: int, output: int, owners: int, interleave: int, spare: list[int]
) -> None:
    division = Division(4, (tuple(range(owners)),), width=owners, interleave=interleave)
    nodes = tuple(range(owners))
    shares = division.shares(nodes, prompt)
    held = division.pages(nodes, shares, prompt + 1)
    held = [pages + more for pages, more in zip(held, spare, strict=False)]
    used = [shares.length(i, prompt) for i in nodes]
    expected = prompt
    while expected < prompt + output:
        shard = shares.appender(expected)
        if used[shard] == held[shard] * 4:
            break
        used[shard] += 1
        expected += 1
    assert division.covered(shares, held, prompt + output) == expected


@pytest.mark.parametrize(
    ("values", "prompt", "limit"),
    [
        ({"width": 2}, 65, "pages of 2 nodes, a request's most owners, hold 64 tokens"),
        ({"streams": ((0,), (1,))}, 40, "the KV pages of one node hold 32 tokens"),
        (
            {"streams": PAIR, "together": True, "divides": "layers", "pages": (8, 5)}, 40,
            "the KV pages of the fullest node hold 20 tokens",
        ),
        ({"width": 2, "max_prompt_tokens": 50}, 51, "a prefill replica holds 50 tokens"),
        ({"width": 2, "max_model_len": 50}, 51, "the longest context is max_model_len=50"),
    ],
)  # fmt: skip
def test_the_error_names_the_limit(
    values: dict[str, object], prompt: int, limit: str, make_limits: MakeLimits
) -> None:
    with pytest.raises(InvalidValue, match=limit):
        make_limits(**values).output_tokens(prompt, None)


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.integers(1, 70), pages=st.lists(st.integers(1, 8), min_size=2, max_size=3),
    interleave=st.integers(1, 6),
)  # fmt: skip
def test_what_is_granted_fits_and_one_more_does_not(
    prompt: int, pages: list[int], interleave: int, make_limits: MakeLimits
) -> None:
    limits = make_limits(pages=tuple(pages), width=len(pages), interleave=interleave)
    division = limits.division
    try:
        output = limits.output_tokens(prompt, None)
    except InvalidValue:
        assert division.fewest_owners(pages, prompt, prompt + 1) is None
    else:
        assert division.fewest_owners(pages, prompt, prompt + output) is not None
        assert division.fewest_owners(pages, prompt, prompt + output + 1) is None
