"""How long prompts and answers are, in tokens."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.exact import Draws, Floats, Integers, exp, ln
from tknp_loadgen.trace.paper_mixed import OUTPUT_TOKENS, STREAM, paper_mixed

KINDS = ("fixed", "paper-mixed", "lognormal", "empirical")
# Names of the two columns in known CSV files: ours, Vidur's, Azure's, BurstGPT's.
INPUT_COLUMNS = ("input_tokens", "num_prefill_tokens", "ContextTokens", "Request tokens")
OUTPUT_COLUMNS = ("output_tokens", "num_decode_tokens", "GeneratedTokens", "Response tokens")


@dataclass(frozen=True)
class Lengths:
    """Where lengths come from.

    fixed         `input_tokens` and `output_tokens` for every request
    paper-mixed   the paper's input lengths, `output_tokens` (1,024) each
    lognormal     both drawn around these medians, with deviation `sigma` of the logarithm
    empirical     rows of the CSV file `path`, drawn with replacement

    `scale` multiplies input lengths (at least 1 token is left), for models with short contexts;
    `output_scale` answers. `max_tokens`: prompts are cut so that prompt plus answer fit.
    """

    kind: str = "fixed"
    input_tokens: int = 512
    output_tokens: int | None = None
    sigma: float = 1.0
    path: Path | None = None
    scale: float = 1.0
    output_scale: float = 1.0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError("lengths", self.kind, f"must be one of {', '.join(KINDS)}")
        if self.kind == "empirical" and self.path is None:
            raise InputError("lengths_file", None, "empirical lengths need a CSV file")
        for name in ("input_tokens", "scale", "output_scale"):
            if getattr(self, name) <= 0:
                raise InputError(name, getattr(self, name), "must be above 0")
        if self.output_tokens is not None and self.output_tokens < 1:
            raise InputError("output_tokens", self.output_tokens, "must be at least 1")

    @property
    def outputs(self) -> int:
        """Answer length where the source has none of its own."""
        if self.output_tokens is not None:
            return self.output_tokens
        return OUTPUT_TOKENS if self.kind == "paper-mixed" else 128

    def describe(self) -> Mapping[str, Any]:
        said: dict[str, Any] = {"kind": self.kind}
        if self.kind in ("fixed", "lognormal"):
            said["input_tokens"] = self.input_tokens
        if self.kind != "empirical":
            said["output_tokens"] = self.outputs
        if self.kind == "lognormal":
            said["sigma"] = self.sigma
        if self.path is not None:
            said["file"] = self.path.name
        for name in ("scale", "output_scale"):
            if getattr(self, name) != 1.0:
                said[name] = getattr(self, name)
        if self.max_tokens is not None:
            said["max_tokens"] = self.max_tokens
        return said

    def draw(self, count: int, seed: int) -> tuple[Integers, Integers]:
        """Input and output lengths of `count` requests."""
        inputs = np.full(count, self.input_tokens, np.int64)
        outputs = np.full(count, self.outputs, np.int64)
        if self.kind == "paper-mixed":
            inputs = paper_mixed(count, seed)
        elif self.kind == "lognormal":
            draws = Draws(seed, STREAM)
            inputs = _around(self.input_tokens, self.sigma, draws.normal(count))
            outputs = _around(self.outputs, self.sigma, draws.normal(count))
        elif self.path is not None:
            known_inputs, known_outputs = read_lengths(self.path)
            chosen = Draws(seed, STREAM).below(len(known_inputs), count)
            inputs, outputs = known_inputs[chosen], known_outputs[chosen]
        return self.fit(inputs, outputs)

    def fit(self, inputs: Integers, outputs: Integers) -> tuple[Integers, Integers]:
        """Scaled, and cut to `max_tokens`."""
        inputs = np.maximum(np.rint(inputs * self.scale), 1).astype(np.int64)
        outputs = np.maximum(np.rint(outputs * self.output_scale), 1).astype(np.int64)
        if self.max_tokens is not None:
            room = self.max_tokens - outputs
            if len(room) and room.min() < 1:
                raise InputError("max_tokens", self.max_tokens,
                                 f"leaves no prompt beside {outputs.max()} output tokens: lower "
                                 "--output-tokens or --output-scale")  # fmt: skip
            inputs = np.minimum(inputs, room)
        return inputs, outputs


def _around(median: int, sigma: float, normal: Floats) -> Integers:
    middle = ln(np.array([float(median)]))
    return np.maximum(np.rint(exp(middle + sigma * normal)), 1).astype(np.int64)


def read_lengths(path: Path) -> tuple[Integers, Integers]:
    """Both columns of a CSV file with a known header; FileError names the line at fault."""
    try:
        file = path.open(newline="", encoding="utf-8")
    except OSError as error:
        raise FileError(path, 0, f"can't be read: {error}") from error
    with file:
        rows = csv.DictReader(file)
        names = rows.fieldnames or ()
        inputs = next((name for name in INPUT_COLUMNS if name in names), None)
        outputs = next((name for name in OUTPUT_COLUMNS if name in names), None)
        if inputs is None or outputs is None:
            raise FileError(path, 1, f"has columns {list(names)}; needs one of {INPUT_COLUMNS} and "
                            f"one of {OUTPUT_COLUMNS}")  # fmt: skip
        values = [
            (_tokens(path, rows.line_num, row[inputs]), _tokens(path, rows.line_num, row[outputs]))
            for row in rows
        ]
    if not values:
        raise FileError(path, 2, "has no rows")
    table = np.array(values, np.int64)
    return table[:, 0], table[:, 1]


def _tokens(path: Path, line: int, text: str | None) -> int:
    try:
        number = float(text or "")
    except ValueError:
        raise FileError(path, line, f"{text!r} is not a number of tokens") from None
    if not number.is_integer() or not 1 <= number < 2**31:
        raise FileError(path, line, f"{text} is not a number of tokens: must be at least 1")
    return int(number)
