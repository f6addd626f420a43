"""Ids to text, one id at a time, never half a character.

What is not yet certain is held back: an incomplete character decodes to at most three U+FFFD at
the end of the text (one for each of its bytes where the vocabulary falls back to bytes).

    ids      ... | prefix | new ...              the window: ids from the last settled text on
    text         | out    | new text | held      held: up to three trailing U+FFFD

The window keeps the ids of the last piece as context, because decoders treat the start of a text
specially (SentencePiece drops its leading space).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_REPLACEMENT = "\ufffd"
_HELD = 3  # bytes of the longest incomplete UTF-8 character
_WINDOW = 64  # ids; a longer run without a settled character is damaged text


class Detokenizer:
    """The text of one stream. All pieces and `flush` together are `decode` of all its ids.

    (A SentencePiece vocabulary decodes a whole run of byte ids as damaged if its end is; a
    character of the run that is already out stays out.)
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], skipped: Collection[int]) -> None:
        """`decode` maps ids to text; ids in `skipped` (special tokens) have none."""
        self._decode = decode
        self._skipped = skipped
        self._window: list[int] = []
        self._fresh = 0  # ids at the end of the window that came since text was last settled
        self._out = 0  # characters of the window's text that the caller has

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes, often one word, possibly empty."""
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        self._fresh += 1
        text = self._decode(self._window)
        held = _held(text)
        piece = text[self._out : len(text) - held]
        self._out += len(piece)
        if piece and not held:
            self._slide(self._fresh)
        elif len(self._window) > _WINDOW:
            # Any incomplete character lies within the last few ids: forget those before.
            context = self._decode(self._window[-_HELD - 1 :])
            piece += text[self._out : len(text) - _held(context)]
            self._slide(_HELD + 1)
        return piece

    def flush(self) -> str:
        """What is still held, when no id will follow."""
        piece = self._decode(self._window)[self._out :] if self._window else ""
        self._window, self._fresh, self._out = [], 0, 0
        return piece

    def _slide(self, keep: int) -> None:
        self._window = self._window[-keep:]
        text = self._decode(self._window)
        self._out = len(text) - _held(text)
        self._fresh = 0


def _held(text: str) -> int:
    return min(len(text) - len(text.rstrip(_REPLACEMENT)), _HELD)
