"""The trace file: one header line, then one JSON object a request, in order of arrival.

    {"tknp_load_trace": 1, "seed": 7, "generator": {...}, "prompts": {...}, "rows": 2, "sha256": ..}
    {"arrival_s": 0.512345, "input_tokens": 8223, "output_tokens": 1024}
    {"arrival_s": 1.734502, "input_tokens": 19138, "output_tokens": 1024}

Times are microseconds, written as decimal seconds. The hash covers the header without its `sha256`
and every row as bytes, so equal hashes mean equal schedules, lengths and prompts. Rows may carry
more, all optional; `EXTRAS` says what.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tknp_loadgen.errors import FileError
from tknp_loadgen.exact import Integers

VERSION = 1
MICRO = 1_000_000
LARGEST_TOKENS = 2**31 - 1
Extra = Mapping[str, Any]

# Optional fields of a row, and what makes a value of them acceptable.
EXTRAS: dict[str, Any] = {
    "user": lambda v: _whole(v) and v >= 0,  # closed loop: whose request it is
    "think_s": lambda v: _number(v) and v >= 0,  # closed loop: pause before it
    "prefix_group": lambda v: _whole(v) and v >= 0,  # requests of a group share
    "prefix_tokens": lambda v: _whole(v) and v >= 0,  # this many first tokens
    "hash_ids": lambda v: isinstance(v, list) and all(map(_whole, v)),  # Mooncake's prefix blocks
    "filler_words": lambda v: _whole(v) and v >= 0,  # needle tasks: words around the needle
    "span": lambda v: isinstance(v, list) and len(v) == 2 and all(map(_whole, v)),  # of a text file
}


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival; row i is element i of every column.

    `arrival_us`: microseconds after release. `extras`: empty, or one mapping a row. A closed-loop
    trace says so in its header; its arrivals are 0 and users' turns decide.
    """

    seed: int
    generator: Mapping[str, Any]
    prompts: Mapping[str, Any]
    arrival_us: Integers
    input_tokens: Integers
    output_tokens: Integers
    extras: Sequence[Extra] = field(default=())

    def __len__(self) -> int:
        return len(self.arrival_us)

    def extra(self, row: int) -> Extra:
        return self.extras[row] if self.extras else {}

    @property
    def users(self) -> int:
        """Users of a closed loop; 0: an open one."""
        arrivals = self.generator.get("arrivals", {})
        return int(arrivals.get("users", 0)) if arrivals.get("kind") == "closed" else 0

    @property
    def span_s(self) -> float:
        """From release to the last arrival."""
        return float(self.arrival_us[-1]) / MICRO if len(self) else 0.0

    @property
    def sha256(self) -> str:
        return _digest(self._head(), self._lines())

    def _head(self) -> dict[str, Any]:
        return {
            "tknp_load_trace": VERSION, "seed": self.seed, "generator": dict(self.generator),
            "prompts": dict(self.prompts), "rows": len(self),
        }  # fmt: skip

    def _lines(self) -> Iterable[str]:
        columns = zip(self.arrival_us.tolist(), self.input_tokens.tolist(),
                      self.output_tokens.tolist(), strict=True)  # fmt: skip
        for row, (arrival, inputs, outputs) in enumerate(columns):
            line = (
                f'{{"arrival_s": {seconds(arrival)}, "input_tokens": {inputs}, '
                f'"output_tokens": {outputs}'
            )
            for name, value in self.extra(row).items():
                line += f", {json.dumps(name)}: {json.dumps(value)}"
            yield line + "}\n"

    def write(self, path: Path) -> str:
        """Write the file and return its hash."""
        head = {**self._head(), "sha256": self.sha256}
        with path.open("w", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(head, sort_keys=True) + "\n")
            file.writelines(self._lines())
        return str(head["sha256"])


def seconds(microseconds: int) -> str:
    """Exact decimal seconds of a whole number of microseconds."""
    return f"{microseconds // MICRO}.{microseconds % MICRO:06d}"


def _digest(head: Mapping[str, Any], lines: Iterable[str]) -> str:
    digest = hashlib.sha256((json.dumps(head, sort_keys=True) + "\n").encode())
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()


def read_trace(path: Path) -> Trace:
    """Read and check a trace. Raises FileError naming file, line and reason."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(path, 0, f"can't be read: {error}") from error
    if not lines:
        raise FileError(path, 1, "is empty: make a trace with `tknp-load gen`")
    head = _header(path, lines[0])
    rows = lines[1:]
    if len(rows) != head["rows"]:
        raise FileError(path, 1, f"the header says {head['rows']} rows, there are {len(rows)}")
    arrivals = np.zeros(len(rows), np.int64)
    inputs, outputs = np.zeros_like(arrivals), np.zeros_like(arrivals)
    extras: list[Extra] = []
    earlier = 0
    for index, line in enumerate(rows):
        row = _row(path, index + 2, line)
        arrival = round(row.pop("arrival_s") * MICRO)
        if arrival < earlier:
            raise FileError(path, index + 2, "arrives before the row above it: sort by arrival_s")
        arrivals[index] = earlier = arrival
        inputs[index], outputs[index] = row.pop("input_tokens"), row.pop("output_tokens")
        extras.append(row)
    wanted = head.pop("sha256")
    if _digest(head, rows) != wanted:
        raise FileError(path, 1, "its content does not match its sha256: it was changed by hand")
    return Trace(
        head["seed"], head["generator"], head["prompts"], arrivals, inputs, outputs,
        tuple(extras) if any(extras) else (),
    )  # fmt: skip


def _header(path: Path, line: str) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except ValueError as error:
        raise FileError(path, 1, f"not JSON: {error}") from error
    if not isinstance(head, dict) or "tknp_load_trace" not in head:
        raise FileError(
            path, 1, "no trace header: convert other formats with `tknp-load gen --replay FILE`"
        )
    if head["tknp_load_trace"] != VERSION:
        raise FileError(path, 1, f"version {head['tknp_load_trace']!r}: this reads {VERSION}")
    kinds = {"seed": int, "generator": dict, "prompts": dict, "rows": int, "sha256": str}
    for name, kind in kinds.items():
        if not isinstance(head.get(name), kind):
            raise FileError(path, 1, f"{name}={head.get(name)!r}: not a {kind.__name__}")
    return head


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise FileError(path, number, f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise FileError(path, number, "not a JSON object")
    arrival = row.get("arrival_s")
    if not isinstance(arrival, int | float) or not 0 <= arrival < 2**40:
        raise FileError(path, number, f"arrival_s={arrival!r}: must be seconds, 0 or more")
    for name in ("input_tokens", "output_tokens"):
        tokens = row.get(name)
        if type(tokens) is not int or not 0 < tokens <= LARGEST_TOKENS:
            raise FileError(path, number, f"{name}={tokens!r}: must be a whole number, 1 or more")
    for name, value in row.items():
        if name in EXTRAS and not EXTRAS[name](value):
            raise FileError(path, number, f"{name}={value!r}: not what this field holds")
    return row
