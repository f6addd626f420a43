"""Traces that others have published, read as (arrival, input, output) rows.

    mooncake   JSONL: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks
    azure      CSV: TIMESTAMP with 7 decimals, ContextTokens, GeneratedTokens
    burstgpt   CSV: Timestamp in s, Request tokens, Response tokens (0: the request failed)
    own        JSONL of `tknp-load gen`

A malformed row is refused with file, line and reason, or skipped and counted. Arrivals count from
the first row's, to the microsecond, in order of time whatever the order of rows.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.exact import Draws, Integers
from tknp_loadgen.trace.format import MICRO, read_trace

FORMATS = ("auto", "mooncake", "azure", "burstgpt", "own")
BLOCK_TOKENS = 512  # of a Mooncake hash id
STREAM = 3


class Row(NamedTuple):
    arrival_us: int
    input_tokens: int
    output_tokens: int
    hash_ids: list[int]


class Malformed(Exception):
    """Why a row can't be used."""


class Unserved(Exception):
    """The source's own server failed this request, so its answer has no length."""


@dataclass(frozen=True)
class Replay:
    """The rows of a file, in order of arrival, and how many were left out and why."""

    format: str
    arrival_us: Integers
    input_tokens: Integers
    output_tokens: Integers
    hash_ids: tuple[list[int], ...]  # empty unless the format has them
    malformed: int
    unserved: int


def read_public(path: Path, format: str = "auto", skip_malformed: bool = False) -> Replay:
    """Read a published trace. `auto` tells the format from the first line."""
    kind = detect(path) if format == "auto" else format
    if kind == "own":
        own = read_trace(path)
        return Replay(kind, own.arrival_us, own.input_tokens, own.output_tokens, (), 0, 0)
    if kind not in _READERS:
        raise InputError("format", format, f"must be one of {', '.join(FORMATS)}")
    rows: list[Row] = []
    malformed = unserved = 0
    for line, parse in _READERS[kind](path):
        try:
            rows.append(parse())
        except Unserved:
            unserved += 1
        except Malformed as reason:
            if not skip_malformed:
                raise FileError(path, line, f"{reason}; --skip-malformed goes on") from None
            malformed += 1
    if not rows:
        raise FileError(path, 0, "has no usable rows")
    rows.sort(key=lambda row: row.arrival_us)
    first = rows[0].arrival_us
    return Replay(
        kind,
        np.array([row.arrival_us - first for row in rows], np.int64),
        np.array([row.input_tokens for row in rows], np.int64),
        np.array([row.output_tokens for row in rows], np.int64),
        tuple(row.hash_ids for row in rows) if kind == "mooncake" else (),
        malformed,
        unserved,
    )


def dejitter(arrival_us: Integers, seed: int) -> Integers:
    """Spread arrivals that share a timestamp over the time until the next one.

    Some sources round to bins of seconds, which turns traffic into bursts that nobody sent. The
    last bin is as wide as the median one. Order is kept.
    """
    starts, first, sizes = np.unique(arrival_us, return_index=True, return_counts=True)
    if len(starts) < 2:
        return arrival_us
    widths = np.diff(starts)
    widths = np.append(widths, int(np.sort(widths)[len(widths) // 2]))
    shares = Draws(seed, STREAM).below(2**32, len(arrival_us))
    result = arrival_us.copy()
    for start, at, size, width in zip(
        starts.tolist(), first.tolist(), sizes.tolist(), widths.tolist(), strict=True
    ):
        if size > 1:
            offsets = np.sort(shares[at : at + size]) * width >> 32
            result[at : at + size] = start + offsets
    return result


def detect(path: Path) -> str:
    """Which format a file has."""
    try:
        with path.open(encoding="utf-8") as file:
            line = file.readline(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(path, 0, f"can't be read: {error}") from error
    known = {"tknp_load_trace": "own", '"hash_ids"': "mooncake", '"input_length"': "mooncake",
             "ContextTokens": "azure", "Response tokens": "burstgpt"}  # fmt: skip
    for mark, format in known.items():
        if mark in line:
            return format
    if "num_prefill_tokens" in line:
        raise FileError(
            path, 1, "has lengths without arrivals: use it with --lengths empirical --lengths-file"
        )
    raise FileError(path, 1, f"is of no known format: name it, one of {', '.join(FORMATS[1:])}")


Parse = Callable[[], Row]


def _mooncake(path: Path) -> Iterator[tuple[int, Parse]]:
    def parse(text: str) -> Row:
        try:
            row = json.loads(text)
        except ValueError as error:
            raise Malformed(f"not JSON: {error}") from None
        if not isinstance(row, dict):
            raise Malformed("not a JSON object")
        blocks = row.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
            raise Malformed(f"hash_ids={blocks!r} are not whole numbers")
        return Row(
            _time_us(row.get("timestamp"), 1000), _tokens(row, "input_length"),
            _tokens(row, "output_length"), blocks,
        )  # fmt: skip

    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, lambda line=line: parse(line)  # type: ignore[misc]


def _csv(path: Path, row_of: Callable[[Mapping[str, Any]], Row]) -> Iterator[tuple[int, Parse]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        for row in rows:
            yield rows.line_num, lambda row=row: row_of(row)  # type: ignore[misc]


def _azure_row(row: Mapping[str, Any]) -> Row:
    text = str(row.get("TIMESTAMP"))
    whole, _, fraction = text.partition(".")
    try:
        moment = datetime.fromisoformat(whole)
        ticks = int(fraction[:7].ljust(7, "0") or 0)  # of 100 ns
    except ValueError:
        raise Malformed(f"TIMESTAMP={text!r} is not a time") from None
    since = moment - datetime(2000, 1, 1)
    arrival = (since.days * 86400 + since.seconds) * MICRO + (ticks + 5) // 10
    return Row(arrival, _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"), [])


def _burstgpt_row(row: Mapping[str, Any]) -> Row:
    if str(row.get("Response tokens")).strip() == "0":
        raise Unserved
    arrival = _time_us(row.get("Timestamp"), MICRO)
    return Row(arrival, _tokens(row, "Request tokens"), _tokens(row, "Response tokens"), [])


_READERS: dict[str, Callable[[Path], Iterator[tuple[int, Parse]]]] = {
    "mooncake": _mooncake,
    "azure": lambda path: _csv(path, _azure_row),
    "burstgpt": lambda path: _csv(path, _burstgpt_row),
}


def _time_us(value: object, unit_us: int) -> int:
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise Malformed(f"timestamp {value!r} is not a number") from None
    if not number.is_finite() or number < 0:
        raise Malformed(f"timestamp {value!r} must be 0 or more")
    return int((number * unit_us).to_integral_value())


def _tokens(row: Mapping[str, Any], name: str) -> int:
    value = row.get(name)
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        raise Malformed(f"{name}={value!r} is not a number") from None
    if not number.is_finite() or number != number.to_integral_value() or not 1 <= number < 2**31:
        raise Malformed(f"{name}={value!r} must be a whole number of at least 1")
    return int(number)
