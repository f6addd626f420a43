"""From settings to a trace: arrivals, lengths and prompts put together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.exact import Draws, Integers
from tknp_loadgen.trace.arrivals import Arrivals
from tknp_loadgen.trace.fitting import check_lengths, fit_needles, fit_spans, single_tokens
from tknp_loadgen.trace.format import MICRO, Trace
from tknp_loadgen.trace.lengths import Lengths
from tknp_loadgen.trace.prompts import Prompts
from tknp_loadgen.trace.public import BLOCK_TOKENS, dejitter, read_public
from tknp_loadgen.trace.tokenizers import Tokenizer, open_tokenizer

STREAM = 5
CHECKED_PROMPTS = 32


@dataclass(frozen=True)
class PromptSettings:
    """How prompts are made. `ids`: the inclusive range of token ids.

    `prefix_groups` above 0 makes so many groups of requests that share the first `prefix_ratio`
    of their prompts.
    """

    kind: str = "ids"
    ids: tuple[int, int] = (1000, 31999)
    tokenizer: str | None = None
    text_file: Path | None = None
    prefix_groups: int = 0
    prefix_ratio: float = 0.5

    def __post_init__(self) -> None:
        if not 0 <= self.ids[0] < self.ids[1] < 2**32:
            raise InputError("token_ids", self.ids, "must be FIRST:LAST, first below last")
        if self.kind != "ids" and self.tokenizer is None:
            raise InputError("tokenizer", None, f"{self.kind} prompts need one to count tokens")
        if self.kind == "file" and self.text_file is None:
            raise InputError("text_file", None, "prompts of a file need the file")
        if self.prefix_groups < 0 or not 0 <= self.prefix_ratio <= 1:
            raise InputError("prefix_groups, prefix_ratio",
                             (self.prefix_groups, self.prefix_ratio),
                             "groups can't be negative, the ratio is in 0..1")  # fmt: skip


@dataclass(frozen=True)
class ReplaySettings:
    """Which published trace, and what is changed in it.

    `time_scale` multiplies arrivals (0.5: twice the rate); requests after `clip_s` of the result
    are left out. `prefixes` keeps the prefix sharing that Mooncake's hash ids describe.
    """

    path: Path
    format: str = "auto"
    time_scale: float = 1.0
    clip_s: float | None = None
    dejitter: bool = False
    skip_malformed: bool = False
    prefixes: bool = False


@dataclass(frozen=True)
class Settings:
    """Everything that a trace depends on. `replay`, if given, stands for arrivals and lengths."""

    arrivals: Arrivals = field(default_factory=lambda: Arrivals("poisson"))
    lengths: Lengths = field(default_factory=Lengths)
    prompts: PromptSettings = field(default_factory=PromptSettings)
    replay: ReplaySettings | None = None
    num_prompts: int | None = None
    duration_s: float | None = None
    seed: int = 0


@dataclass
class _Rows:
    """Columns under construction."""

    arrival_us: Integers
    input_tokens: Integers
    output_tokens: Integers
    extras: list[dict[str, Any]]
    generator: dict[str, Any]


def build(settings: Settings) -> Trace:
    """The trace; raises InputError or FileError for what can't be made."""
    if settings.seed < 0:
        raise InputError("seed", settings.seed, "can't be negative")
    rows = _replayed(settings, settings.replay) if settings.replay else _drawn(settings)
    if not rows.extras:
        rows.extras = [{} for _ in rows.arrival_us]
    how = _prompts(settings, rows)
    trace = Trace(
        settings.seed, rows.generator, how, rows.arrival_us, rows.input_tokens, rows.output_tokens,
        tuple(rows.extras) if any(rows.extras) else (),
    )  # fmt: skip
    if settings.prompts.tokenizer is not None:
        _check(trace, settings, open_tokenizer(settings.prompts.tokenizer))
    return trace


def _drawn(settings: Settings) -> _Rows:
    count = settings.num_prompts
    if count is None and settings.duration_s is not None:
        count = settings.arrivals.expected_count(settings.duration_s)
    if count is None or count < 1:
        raise InputError("num_prompts", count, "give --num-prompts, or --duration-s with a rate")
    inputs, outputs = settings.lengths.draw(count, settings.seed)
    return _Rows(
        settings.arrivals.times_us(count, settings.seed), inputs, outputs,
        settings.arrivals.extras(count, settings.seed),
        {"arrivals": settings.arrivals.describe(), "lengths": settings.lengths.describe()},
    )  # fmt: skip


def _replayed(settings: Settings, replay: ReplaySettings) -> _Rows:
    source = read_public(replay.path, replay.format, replay.skip_malformed)
    if not 0 < replay.time_scale < float("inf"):
        raise InputError("time_scale", replay.time_scale, "must be above 0")
    arrivals = source.arrival_us
    if replay.dejitter:
        arrivals = dejitter(arrivals, settings.seed)
    arrivals = np.rint(arrivals * replay.time_scale).astype(np.int64)
    keep = len(arrivals)
    if replay.clip_s is not None:
        keep = int(np.searchsorted(arrivals, round(replay.clip_s * MICRO), side="right"))
    keep = min(keep, settings.num_prompts or keep)
    if not keep:
        raise InputError("clip_s", replay.clip_s, "leaves no request")
    inputs, outputs = settings.lengths.fit(source.input_tokens, source.output_tokens)
    extras: list[dict[str, Any]] = []
    if replay.prefixes:
        if not source.hash_ids:
            raise InputError("prefixes", source.format, "only Mooncake traces have hash ids")
        extras = [{"hash_ids": blocks} for blocks in source.hash_ids[:keep]]
    said = {
        "file": replay.path.name, "format": source.format, "time_scale": replay.time_scale,
        "dejitter": replay.dejitter, "clip_s": replay.clip_s, "malformed": source.malformed,
        "unserved": source.unserved, "scale": settings.lengths.scale,
        "output_scale": settings.lengths.output_scale, "max_tokens": settings.lengths.max_tokens,
    }  # fmt: skip
    return _Rows(arrivals[:keep], inputs[:keep], outputs[:keep], extras, {"replay": said})


def _prompts(settings: Settings, rows: _Rows) -> dict[str, Any]:
    """The header's `prompts`; rows get what theirs need."""
    chosen = settings.prompts
    how: dict[str, Any] = {"kind": chosen.kind}
    if any("hash_ids" in extra for extra in rows.extras):
        how["block_tokens"] = BLOCK_TOKENS
    if chosen.prefix_groups:
        if chosen.kind not in ("ids", "text"):
            raise InputError("prefix_groups", chosen.prefix_groups, "only for ids and text prompts")
        groups = Draws(settings.seed, STREAM).below(chosen.prefix_groups, len(rows.extras))
        for extra, group, tokens in zip(
            rows.extras, groups.tolist(), rows.input_tokens.tolist(), strict=True
        ):
            extra |= {"prefix_group": group, "prefix_tokens": int(tokens * chosen.prefix_ratio)}
    if chosen.kind == "ids":
        return how | {"first_id": chosen.ids[0], "last_id": chosen.ids[1]}
    tokenizer = open_tokenizer(str(chosen.tokenizer))
    if chosen.kind == "file" and chosen.text_file is not None:
        return how | _file(settings, rows, chosen.text_file, tokenizer)
    words, added = single_tokens(tokenizer)
    shortest = int(rows.input_tokens.min())
    if shortest <= added:
        raise InputError("input_tokens", shortest, f"the tokenizer itself adds {added} tokens")
    if chosen.kind == "needle":
        needles = fit_needles(tokenizer, words, rows.input_tokens, settings.seed)
        _add(rows.extras, needles)
    return how | {"words": words, "added_tokens": added, "tokenizer": tokenizer.name}


def _file(settings: Settings, rows: _Rows, path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
        content = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(path, 0, f"can't be read: {error}") from error
    _add(rows.extras, fit_spans(tokenizer, path, content, rows.input_tokens, settings.seed))
    return {
        "file": path.name, "file_sha256": hashlib.sha256(raw).hexdigest(),
        "tokenizer": tokenizer.name,
    }  # fmt: skip


def _add(extras: list[dict[str, Any]], more: Sequence[dict[str, Any]]) -> None:
    for extra, fields in zip(extras, more, strict=True):
        extra |= fields


def _check(trace: Trace, settings: Settings, tokenizer: Tokenizer) -> None:
    """Count the tokens of some prompts: the shortest, the longest, and between."""
    if trace.prompts["kind"] == "ids":
        return
    prompts = Prompts(trace, settings.prompts.text_file)
    order = np.argsort(trace.input_tokens, kind="stable")
    picks = np.unique(np.linspace(0, len(trace) - 1, min(len(trace), CHECKED_PROMPTS)).astype(int))
    texts = {row: prompts.make(row).text or "" for row in order[picks].tolist()}
    check_lengths(tokenizer, texts, trace.input_tokens)
