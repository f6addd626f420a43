"""Stop strings, found in text that comes piece by piece.

A text ends where the first stop string is complete; of several that end at the same character the
longest counts. The stop string itself is cut off. What could still become one is held back, and
nothing else, so the pieces given out never depend on how the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence

from tknp.errors import InvalidValue
from tknp.model.detokenizer import Detokenizer

MAX_STOPS = 16
MAX_STOP_LENGTH = 256


def check_stops(stops: Sequence[str]) -> None:
    """Raise InvalidValue unless `stops` can be watched for."""
    if len(stops) > MAX_STOPS:
        raise InvalidValue("stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    for index, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            remedy = f"must have 1 to {MAX_STOP_LENGTH} characters"
            raise InvalidValue(f"stop[{index}]", f"{len(stop)} characters", remedy)


class StopScanner:
    """The text of one stream up to its first stop string. Empty `stops`: all of it.

    `matched`: the stop string that ended it, once there was one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """What can be given out now that `text` has come. Nothing after a match."""
        if self.matched is not None:
            return ""
        text = self._held + text
        found = min(
            ((at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=None,
        )
        if found is not None:
            _, at, self.matched = found
            self._held = ""
            return text[:at]
        keep = self._unsettled(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What is still held, when no text will follow."""
        held, self._held = self._held, ""
        return held

    def _unsettled(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        return max(
            (
                size
                for stop in self._stops
                for size in range(1, min(len(stop), len(text) + 1))
                if text.endswith(stop[:size])
            ),
            default=0,
        )


class StreamText:
    """Text of one stream of ids, cut at a stop string.

    `tokens`: ids pushed so far. No stop string counts before `min_tokens` of them.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._scanner = StopScanner(stops)
        self._min_tokens = min_tokens
        self.tokens = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._scanner.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that can be given out now that `token_ids` have come, up to a stop string."""
        if not self._stops:
            self.tokens += len(token_ids)
            return self._detokenizer.push(*token_ids)
        pieces = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.tokens += 1
            piece = self._detokenizer.push(token_id)
            pieces.append(piece if self.tokens < self._min_tokens else self._scanner.push(piece))
        return "".join(pieces)

    def flush(self) -> str:
        """What is still held, when no id will follow; a stop string may complete in it."""
        return self._scanner.push(self._detokenizer.flush()) + self._scanner.flush()
