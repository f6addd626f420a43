"""Prompts of exactly as many tokens as a trace says, for a given tokenizer.

Found out when a trace is made, so that a run needs no tokenizer: which words are one token each
wherever they stand, how many a needle task takes, where a span of a file ends. A sample of the
finished prompts is counted again; servers' own counts are compared with the trace in every run.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.exact import Draws, Integers
from tknp_loadgen.trace.prompts import needle
from tknp_loadgen.trace.tokenizers import Tokenizer
from tknp_loadgen.trace.words import WORDS

STREAM = 4
FEWEST_WORDS = 20
TRIES = 40


def single_tokens(tokenizer: Tokenizer) -> tuple[list[str], int]:
    """Strings that add one token each wherever they stand, and what every prompt has besides.

    Words with a space before them where a tokenizer has them whole, else letters.
    """
    for candidates in ([f" {word}" for word in WORDS], list(string.ascii_lowercase)):
        first = candidates[0]
        added = tokenizer.count(first * 3) - 3
        good = [
            unit for unit in dict.fromkeys(candidates)
            if tokenizer.count(first + unit * 2 + first) == 4 + added
        ]  # fmt: skip
        mixed = "".join(good[i] for i in Draws(0, STREAM).below(len(good), 512)) if good else ""
        if len(good) >= FEWEST_WORDS and tokenizer.count(mixed) == 512 + added:
            return good, added
    raise InputError("tokenizer", tokenizer.name, "has too few words of one token: use ids")


def fit_needles(
    tokenizer: Tokenizer, words: Sequence[str], lengths: Integers, seed: int
) -> list[dict[str, Any]]:
    """How many filler words make each row's needle task as long as it should be."""
    table = np.array(words, dtype=np.str_)
    extras = []
    for row, wanted in enumerate(lengths.tolist()):
        filler = max(0, wanted - 40)
        for _ in range(TRIES):
            got = tokenizer.count(needle(seed, row, filler, table).text or "")
            if got == wanted:
                break
            filler += wanted - got
            if filler < 0:
                raise InputError("input_tokens", wanted, "too short for a needle and a question")
        else:
            raise InputError("tokenizer", tokenizer.name, f"no needle task of {wanted} tokens fits")
        extras.append({"filler_words": filler})
    return extras


def fit_spans(
    tokenizer: Tokenizer, path: Path, content: str, lengths: Integers, seed: int
) -> list[dict[str, Any]]:
    """For each row a span of `content`, from a word somewhere in it, of exactly so many tokens."""
    starts = [0, *(i + 1 for i, letter in enumerate(content) if letter.isspace())]
    if int(lengths.max()) > len(content.encode()):  # no tokenizer makes more than one a byte
        raise FileError(path, 0, f"is shorter than a prompt of {lengths.max()} tokens")
    draws = Draws(seed, STREAM)
    spans: list[dict[str, Any]] = []
    taken: set[tuple[int, int]] = set()
    for wanted in lengths.tolist():
        for _ in range(TRIES):
            start = starts[int(draws.below(len(starts), 1)[0])]
            stop = _stop(tokenizer, content, start, wanted)
            if stop is not None and (start, stop) not in taken:
                taken.add((start, stop))
                spans.append({"span": [start, stop]})
                break
        else:
            raise FileError(path, 0, f"has too little text for distinct prompts of {wanted} tokens")
    return spans


def _stop(tokenizer: Tokenizer, content: str, start: int, wanted: int) -> int | None:
    """Where a span of `wanted` tokens ends: bisection, then a look at the characters around."""
    low, high = start, min(len(content), start + 32 * wanted)
    if tokenizer.count(content[start:high]) < wanted:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if tokenizer.count(content[start:middle]) < wanted:
            low = middle
        else:
            high = middle
    near = range(max(start + 1, high - 4), min(len(content), high + 8) + 1)
    return next((stop for stop in near if tokenizer.count(content[start:stop]) == wanted), None)


def check_lengths(tokenizer: Tokenizer, prompts: Mapping[int, str], lengths: Integers) -> None:
    """Raise InputError where a finished prompt has another length than the trace says."""
    for row, text in prompts.items():
        counted = tokenizer.count(text)
        if counted != lengths[row]:
            raise InputError(
                "tokenizer", tokenizer.name,
                f"prompt {row} has {counted} tokens, not {lengths[row]}: use ids",
            )  # fmt: skip
