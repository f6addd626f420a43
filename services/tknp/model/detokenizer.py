"""Ids to text as they come, never half a character.

An incomplete character decodes to U+FFFD at the end of the text, so what ends so is held back
until an id settles it.

    ids      ... | context | fresh ...           the window
    text         | out     | piece | held        held: trailing U+FFFD

The ids of the last piece stay in the window as context, because decoders treat the start of a text
specially (SentencePiece drops its leading space).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

_REPLACEMENT = "\ufffd"
_INCOMPLETE = 3  # bytes, and so U+FFFD, of the longest incomplete UTF-8 character
_DAMAGED = 64  # ids; a longer run without a settled character is damaged text
_CONTEXT = 16  # ids that decode to the same last U+FFFD whatever stands before them


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

    def push(self, *token_ids: int) -> str:
        """Text that `token_ids` complete, of one often a word, possibly empty."""
        shown = [token_id for token_id in token_ids if token_id not in self._skipped]
        if len(shown) > 1 and self._decode(self._window + shown).endswith(_REPLACEMENT):
            # What settles before the end can't be told from the whole: of bytes that stand for
            # characters, decoders take a run for damaged if its end is.
            return "".join(self._push([token_id]) for token_id in shown)
        return self._push(shown) if shown else ""

    def flush(self) -> str:
        """What is still held, when no id will follow."""
        piece = self._decode(self._window)[self._out :] if self._window else ""
        self._window, self._fresh, self._out = [], 0, 0
        return piece

    def _push(self, shown: list[int]) -> str:
        self._window += shown
        self._fresh += len(shown)
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        piece = text[self._out : len(text) - held]
        self._out += len(piece)
        if piece and not held:
            self._slide(self._fresh, held)
        elif self._fresh > _DAMAGED:
            held = min(held, _INCOMPLETE)
            piece += text[self._out : len(text) - held]
            self._slide(_CONTEXT, held)
        return piece

    def _slide(self, keep: int, held: int) -> None:
        """Forget all but the last `keep` ids, whose last `held` characters aren't out yet."""
        self._window = self._window[-keep:]
        self._out = len(self._decode(self._window)) - held
        self._fresh = 0
