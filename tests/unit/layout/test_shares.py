"""Shares of a sequence: every token has one owner and one slot, whatever grows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.layout.shares import Phase, Shares

few = settings(max_examples=50, deadline=None)


@st.composite
def draw_shares(draw: st.DrawFn) -> tuple[Shares, int]:
    """Shares that have grown up to twice, and a number of tokens."""
    prompt, interleave = draw(st.integers(0, 40)), draw(st.integers(1, 6))
    width = draw(st.integers(1, 4))
    shares = Shares(tuple(range(10, 10 + width)), prompt, interleave)
    at = prompt
    for _ in range(draw(st.integers(0, 2))):
        at += draw(st.integers(0, 3 * interleave))
        added = draw(st.integers(0, 2))
        total = width + added
        shards = draw(st.permutations(range(total)))[: draw(st.integers(1, total))]
        shares = shares.grown(tuple(range(10 + width, 10 + total)), at, tuple(shards))
        width = total
    return shares, at + draw(st.integers(0, 40))


def _slots(shares: Shares, tokens: int) -> dict[int, list[int]]:
    """Slots of the first `tokens` tokens by shard, in order of position."""
    slots = defaultdict(list)
    for position in range(tokens):
        slots[shares.appender(position)].append(shares.slot(position))
    return slots


@few
@given(draw_shares())
def test_every_position_has_exactly_one_slot(drawn: tuple[Shares, int]) -> None:
    shares, tokens = drawn
    for shard, slots in _slots(shares, tokens).items():
        assert slots == list(range(shares.length(shard, tokens)))


@few
@given(draw_shares())
def test_lengths_sum_to_the_tokens(drawn: tuple[Shares, int]) -> None:
    shares, tokens = drawn
    for some in range(tokens + 1):
        lengths = [shares.length(i, some) for i in range(len(shares.owners))]
        assert sum(lengths) == some
        assert min(lengths) >= 0


@few
@given(draw_shares(), st.data())
def test_growth_keeps_what_is_stored(drawn: tuple[Shares, int], data: st.DataObject) -> None:
    shares, tokens = drawn
    shards = data.draw(st.permutations(range(len(shares.owners) + 1)))
    grown = shares.grown((99,), max(tokens, shares.phases[-1].start), tuple(shards))
    assert _slots(grown, tokens) == _slots(shares, tokens)
    assert grown.owners[:-1] == shares.owners
    assert [grown.prompt_span(i) for i in range(len(shares.owners))] == [
        shares.prompt_span(i) for i in range(len(shares.owners))
    ]


@few
@given(draw_shares())
def test_prompt_spans_are_contiguous_and_agree_with_appenders(drawn: tuple[Shares, int]) -> None:
    shares, _ = drawn
    spans = [shares.prompt_span(i) for i in range(len(shares.owners))]
    assert [position for span in spans for position in span] == list(range(shares.prompt))
    for shard, span in enumerate(spans):
        assert all(shares.appender(position) == shard for position in span)
    sharing = [len(span) for span in spans[: len(shares.phases[0].shards)]]
    assert max(sharing) <= -(-shares.prompt // len(sharing))


@few
@given(st.integers(0, 30), st.integers(1, 6), st.integers(0, 60))
def test_one_owner_keeps_every_token_at_its_position(
    prompt: int, interleave: int, position: int
) -> None:
    shares = Shares((7,), prompt, interleave)
    assert (shares.owner_at(position), shares.slot(position)) == (7, position)
    assert shares.length(0, position) == position


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("prompt", [0, 1, 2, 3, 10])
def test_turns_change_exactly_at_the_interleave(prompt: int, interleave: int) -> None:
    """Also where the prompt is shorter than the number of shards: the last keep none of it."""
    shares = Shares((5, 2, 8), prompt, interleave)
    assert [len(shares.prompt_span(i)) for i in range(3)] == {
        0: [0, 0, 0], 1: [1, 0, 0], 2: [1, 1, 0], 3: [1, 1, 1], 10: [4, 4, 2],
    }[prompt]  # fmt: skip
    for turn in range(5):
        first = prompt + turn * interleave
        owner = (5, 2, 8)[turn % 3]
        assert shares.owner_at(first) == shares.owner_at(first + interleave - 1) == owner
        assert shares.owner_at(first + interleave) == (5, 2, 8)[(turn + 1) % 3]
        if turn:
            assert shares.owner_at(first - 1) == (5, 2, 8)[(turn - 1) % 3]


def test_growth_reads_as_the_picture_in_the_docstring() -> None:
    shares = Shares((4, 1), 5, 2).grown((), 9, (1,))
    assert [shares.appender(p) for p in range(12)] == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1]
    assert [shares.slot(p) for p in range(12)] == [0, 1, 2, 0, 1, 3, 4, 2, 3, 4, 5, 6]


def test_phase_at_the_end_of_the_prompt_moves_generation_alone() -> None:
    """A request wide for its prompt's sake can generate on one owner."""
    shares = Shares((3, 6), 8, 16).grown((), 8, (1,))
    assert [shares.prompt_span(i) for i in range(2)] == [range(4), range(4, 8)]
    assert {shares.owner_at(p) for p in range(8, 60)} == {6}
    assert (shares.shard_of(6), shares.shard_of(0)) == (1, None)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("owners", {"owners": ()}),
        ("owners", {"owners": (1, 1)}),
        ("prompt", {"prompt": -1}),
        ("interleave", {"interleave": 0}),
        ("phases[0]", {"phases": (Phase(5, (0, 1)),)}),
        ("phases[0]", {"phases": (Phase(4, (1, 0)),)}),
        ("phases[1].shards", {"phases": (Phase(4, (0, 1)), Phase(6, ()))}),
        ("phases[1].shards", {"phases": (Phase(4, (0, 1)), Phase(6, (2,)))}),
        ("phases[1].shards", {"phases": (Phase(4, (0, 1)), Phase(6, (1, 1)))}),
        ("phases", {"phases": (Phase(4, (0, 1)), Phase(8, (0,)), Phase(6, (1,)))}),
    ],
)
def test_shares_that_can_not_be_are_refused(field: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as error:
        Shares(**{"owners": (3, 1), "prompt": 4, **arguments})
    assert error.value.field == field


def test_growth_into_the_past_is_refused() -> None:
    shares = Shares((3,), 4).grown((1,), 9, (1,))
    with pytest.raises(InvalidValue, match=r"start=8: must be 9 or later"):
        shares.grown((2,), 8, (2,))
