"""Streams of a byte-level vocabulary, and of one with SentencePiece's byte fallback."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tknp.model.detokenizer import Detokenizer

LETTERS = bytes_to_unicode()
SPECIAL = 256
EMOJI = "👩\u200d👩\u200d👧".encode()


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={LETTERS[b]: b for b in range(256)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {"▁the": 257, "▁": 258, "é": 259}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTES, PIECES = byte_level(), byte_fallback()


def stream(tokenizer: Tokenizer, ids: list[int], together: int = 1) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode, {SPECIAL})
    pushed = [ids[at : at + together] for at in range(0, len(ids), together)]
    return [*(detokenizer.push(*some) for some in pushed), detokenizer.flush()]


def damaged_utf8() -> st.SearchStrategy[list[int]]:
    """Text, special ids and stray bytes in any order."""
    text = st.text(max_size=4).map(lambda s: list(s.encode("utf-8", "replace")))
    part = text | st.just([SPECIAL]) | st.lists(st.integers(0, 255), max_size=6)
    return st.lists(part, max_size=12).map(lambda parts: [i for p in parts for i in p])


@settings(deadline=None)
@given(damaged_utf8(), st.integers(1, 5))
def test_byte_level_pieces_join_to_the_decoded_whole(ids: list[int], together: int) -> None:
    assert "".join(stream(BYTES, ids, together)) == BYTES.decode(ids)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([*"é世👩".encode()]), min_size=100, max_size=150),
    st.text(max_size=5),
    st.sampled_from([1, 64, 200]),
)
def test_damage_longer_than_the_window_joins_too(
    damage: list[int], text: str, together: int
) -> None:
    ids = [*damage, *text.encode()]
    assert "".join(stream(BYTES, ids, together)) == BYTES.decode(ids)


@settings(deadline=None)
@given(
    st.lists(
        st.text("aé世👩 ", min_size=1, max_size=9) | st.sampled_from([257, 258, 259]), max_size=90
    ),
    st.integers(1, 5) | st.sampled_from([64, 70, 200]),
)
def test_byte_fallback_pieces_join_to_the_decoded_whole(
    parts: list[str | int], together: int
) -> None:
    ids = [i for p in parts for i in ([p] if isinstance(p, int) else p.encode())]
    assert "".join(stream(PIECES, ids, together)) == PIECES.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTES, PIECES], ids=["byte-level", "byte-fallback"])
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer) -> None:
    pieces = stream(tokenizer, [97, *EMOJI, 98])
    assert [piece for piece in pieces if piece] == ["a", *EMOJI.decode(), "b"]


def test_text_before_an_incomplete_character_is_not_held() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"ab" + LETTERS[0xE4]: 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    assert stream(tokenizer, [0]) == ["ab", "\ufffd"]


def test_flush_gives_what_never_completed() -> None:
    assert stream(BYTES, [97, 0xF0, 0x9F]) == ["a", "", "", "\ufffd"]


def test_special_ids_have_no_text_and_keep_spaces() -> None:
    assert stream(PIECES, [257, SPECIAL, 257]) == ["the", "", " the", ""]
