"""The token files of a run, read in blocks: gaps between tokens, and tokens over time.

A gap between two chunks (inter-chunk latency, ICL) is divided by the tokens of the later chunk and
counts once for each of them (inter-token latency, ITL): a server that sends four tokens at once has
neither three gaps of zero nor one four times too long. The wait for the first chunk is no gap.

Where a server tells the number of tokens only at its end, chunks are taken to be of equal size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tknp_loadgen.errors import FileError
from tknp_loadgen.exact import Floats
from tknp_loadgen.measure.columns import Columns
from tknp_loadgen.measure.percentile import GapCounts
from tknp_loadgen.run.records import CHUNK

CHUNK_TYPE = np.dtype([("at_ns", "<i8"), ("row", "<u4"), ("tokens", "<u2")])
BLOCK_CHUNKS = 1 << 18
BINS_MOST = 3600


@dataclass
class Tokens:
    """What the token files say. `per_bin`: tokens that arrived in each `bin_s` from release."""

    itl: GapCounts
    icl: GapCounts
    per_bin: Floats
    bin_s: float
    in_window: float  # tokens that came until the last scheduled arrival
    total: float
    estimated_requests: int  # whose tokens a chunk had to be estimated


def token_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("tokens*.bin"))


def read_tokens(directory: Path, columns: Columns) -> Tokens:
    """Read all token files of a run whose records are `columns`."""
    rows = int(columns.row.max(initial=-1)) + 1
    counted = np.zeros(rows)
    told = np.zeros(rows)
    wanted = np.zeros(rows, bool)
    counted[columns.row] = columns.counts["counted_tokens"]
    told[columns.row] = columns.counts["completion_tokens"]
    wanted[columns.row] = columns.scheduled
    factor = np.where((counted > 0) & (told > counted), told / np.maximum(counted, 1), 1.0)
    ends = columns["ended_s"]
    last_s = float(np.nanmax(ends)) if len(ends) and not np.isnan(ends).all() else 0.0
    window_s = float(columns["scheduled_s"].max(initial=0.0))
    bin_s = max(0.1, last_s / BINS_MOST)
    tokens = Tokens(GapCounts(), GapCounts(), np.zeros(int(last_s / bin_s) + 2), bin_s, 0.0, 0.0,
                    int((factor != 1.0).sum()))  # fmt: skip
    for path in token_files(directory):
        _read(path, tokens, factor, wanted, window_s)
    return tokens


def _read(path: Path, tokens: Tokens, factor: Floats, wanted: np.ndarray, window_s: float) -> None:
    if path.stat().st_size % CHUNK.size:
        raise FileError(path, 0, "was cut within an entry")
    last_ns = np.full(len(factor), -1, np.int64)
    with path.open("rb") as file:
        while block := file.read(BLOCK_CHUNKS * CHUNK.size):
            chunks = np.frombuffer(block, CHUNK_TYPE)
            if int(chunks["row"].max()) >= len(factor):
                raise FileError(path, 0, "names a row that has no record")
            keep = wanted[chunks["row"]]
            chunks = chunks[keep]
            at_ns, row = chunks["at_ns"], chunks["row"].astype(np.int64)
            size = chunks["tokens"] * factor[row]
            at_s = at_ns / 1e9
            bins = np.clip((at_s / tokens.bin_s).astype(np.int64), 0, len(tokens.per_bin) - 1)
            tokens.per_bin += np.bincount(bins, size, len(tokens.per_bin))
            tokens.total += float(size.sum())
            tokens.in_window += float(size[at_s <= window_s].sum())
            _gaps(tokens, row, at_ns, size, last_ns)


def _gaps(
    tokens: Tokens, row: np.ndarray, at_ns: np.ndarray, size: Floats, last_ns: np.ndarray
) -> None:
    """Gaps to each request's chunk before, which may be in an earlier block (`last_ns`)."""
    order = np.argsort(row, kind="stable")
    row, at_ns, size = row[order], at_ns[order], size[order]
    first = np.append(True, row[1:] != row[:-1]) if len(row) else np.empty(0, bool)
    before = np.append(0, at_ns[:-1]) if len(row) else at_ns
    before = np.where(first, last_ns[row], before)
    known = before >= 0
    gaps_us = (at_ns - before)[known] / 1e3
    tokens.icl.add(gaps_us, np.ones(len(gaps_us)))
    tokens.itl.add(gaps_us / size[known], size[known])
    if len(row):
        ends = np.append(first[1:], True)
        last_ns[row[ends]] = at_ns[ends]
