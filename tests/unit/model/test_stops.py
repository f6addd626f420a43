"""Stop strings beside a reference that sees the whole text at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.model.stops import MAX_STOPS, StopScanner, check_stops

LETTERS = st.text("ab\u00e9\u4e2d", max_size=12)


def cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """Text before the first stop string to be complete, the longest where several are."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=300)
@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab\u00e9\u4e2d", min_size=1, max_size=4)))
def test_pieces_join_to_the_text_cut_as_a_whole(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    out = "".join(map(scanner.push, pieces))
    if scanner.matched is None:
        out += scanner.flush()
    assert (out, scanner.matched) == cut("".join(pieces), stops)


@settings(max_examples=200)
@given(st.lists(LETTERS, max_size=6), st.lists(st.text("ab\u00e9\u4e2d", min_size=1, max_size=4)))
def test_only_what_could_become_a_stop_string_is_held(pieces: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    out = text = ""
    for piece in pieces:
        out += scanner.push(piece)
        text += piece
        if scanner.matched is not None:
            return
        held = text[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_nothing_follows_a_match() -> None:
    scanner = StopScanner(["."])
    assert scanner.push("a.b") == "a"
    assert scanner.push("c") == scanner.flush() == ""


@pytest.mark.parametrize(
    ("stops", "field"),
    [(["a"] * (MAX_STOPS + 1), "stop"), ([""], "stop[0]"), (["a" * 257], "stop[0]")],
)
def test_what_can_not_be_watched_for_is_refused(stops: list[str], field: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        check_stops(stops)
    assert caught.value.field == field
