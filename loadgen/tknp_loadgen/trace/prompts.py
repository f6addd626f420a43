"""What each request says: made from (seed, row) when it is needed, never stored.

A header's `prompts` object says how; no tokenizer is needed to make them again.

    ids      token ids drawn from first_id .. last_id
    text     " word word ..." of `words`, each of which is one token wherever it stands, after
             `added_tokens` that the tokenizer puts around every prompt
    needle   text with a fact at some depth and a question about it at the end (as in RULER)
    file     spans of a text file

Every prompt is distinct. Warm-up has prompts of its own, so that it fills no prefix cache. Rows of
one `prefix_group` share their first `prefix_tokens`; rows with equal leading `hash_ids` share those
blocks. Both happen only where the trace says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.exact import Draws
from tknp_loadgen.trace.format import Trace

Ids = NDArray[np.uint32]
_MEASURED, _WARM_UP, _GROUP, _BLOCK, _NEEDLE = 10, 11, 12, 13, 14  # streams of Draws
QUESTION = " What is the secret number of the {key}? The secret number of the {key} is"
NEEDLE = " Remember: the secret number of the {key} is {value}."


@dataclass(frozen=True)
class Prompt:
    """Exactly one of `ids` and `text`. `answer`: what a right completion contains."""

    ids: Ids | None = None
    text: str | None = None
    answer: str | None = None


class Prompts:
    """Makes the prompts of a trace. `text_file`: where a `file` trace's text is now."""

    def __init__(self, trace: Trace, text_file: Path | None = None) -> None:
        self._trace = trace
        self._how = trace.prompts
        self._seed = trace.seed
        self._kind = str(self._how.get("kind"))
        makers = {"ids": self._ids, "text": self._text, "needle": self._needle, "file": self._file}
        if self._kind not in makers:
            raise InputError("prompts", self._kind, f"must be one of {', '.join(makers)}")
        self._make = makers[self._kind]
        self._words = np.array(self._how.get("words", ()), dtype=np.str_)
        self._content = self._read(text_file) if self._kind == "file" else ""

    def make(self, row: int) -> Prompt:
        """The prompt of a row of the trace."""
        return self._make(
            row, int(self._trace.input_tokens[row]), self._trace.extra(row), _MEASURED
        )

    def warm_up(self, number: int) -> Prompt:
        """Another prompt, as long as a row's but equal to none of them."""
        row = number % len(self._trace)
        tokens = int(self._trace.input_tokens[row])
        if self._kind == "ids":
            return self._ids(number, tokens, {}, _WARM_UP)
        if self._kind == "file":
            return Prompt(text=f"warm up {number}: " + (self.make(row).text or "")[:-20])
        return self._text(number, tokens, {}, _WARM_UP)

    def _ids(self, row: int, tokens: int, extra: Mapping[str, Any], stream: int) -> Prompt:
        first = int(self._how["first_id"])
        bound = int(self._how["last_id"]) - first + 1
        return Prompt(ids=(self._units(row, tokens, extra, stream, bound) + first).astype("<u4"))

    def _text(self, row: int, tokens: int, extra: Mapping[str, Any], stream: int) -> Prompt:
        count = tokens - int(self._how["added_tokens"])
        chosen = self._units(row, count, extra, stream, len(self._words))
        return Prompt(text="".join(self._words[chosen].tolist()))

    def _units(
        self, row: int, count: int, extra: Mapping[str, Any], stream: int, bound: int
    ) -> NDArray[np.int64]:
        """`count` numbers below `bound`: those shared with other rows first."""
        shared: list[NDArray[np.int64]] = []
        if "prefix_group" in extra:
            group = Draws(self._seed, _GROUP, int(extra["prefix_group"]))
            shared = [group.below(bound, min(count, int(extra["prefix_tokens"])))]
        elif "hash_ids" in extra:
            block = int(self._how["block_tokens"])
            shared = [
                Draws(self._seed, _BLOCK, identity).below(bound, block)
                for identity in extra["hash_ids"][: count // block]
            ]
        own = count - sum(map(len, shared))
        return np.concatenate([*shared, Draws(self._seed, stream, row).below(bound, own)])

    def _needle(self, row: int, tokens: int, extra: Mapping[str, Any], stream: int) -> Prompt:
        return needle(self._seed, row, int(extra["filler_words"]), self._words)

    def _file(self, row: int, tokens: int, extra: Mapping[str, Any], stream: int) -> Prompt:
        start, stop = extra["span"]
        return Prompt(text=self._content[start:stop])

    def _read(self, path: Path | None) -> str:
        if path is None:
            raise InputError("text_file", None, f"needed: prompts are of {self._how['file']}")
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileError(path, 0, f"can't be read: {error}") from error
        if hashlib.sha256(content).hexdigest() != self._how["file_sha256"]:
            raise FileError(path, 0, "is not the file that the trace was made from")
        return content.decode("utf-8")


def needle(seed: int, row: int, filler: int, words: NDArray[np.str_]) -> Prompt:
    """A fact at a random depth of `filler` words, and a question whose answer is its number."""
    draws = Draws(seed, _NEEDLE, row)
    chosen = words[draws.below(len(words), filler)].tolist()
    key = words[draws.below(len(words), 2)].tolist()
    value = str(1_000_000 + int(draws.below(9_000_000, 1)[0]))
    at = int(draws.below(filler + 1, 1)[0])
    names = {"key": "".join(key).strip(), "value": value}
    fact, question = NEEDLE.format(**names), QUESTION.format(**names)
    text = "".join([*chosen[:at], fact, *chosen[at:], question])
    return Prompt(text=text, answer=value)
