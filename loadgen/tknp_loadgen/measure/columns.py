"""The records of a run as columns, one element a request, in order of rows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tknp_loadgen.errors import FileError
from tknp_loadgen.exact import Floats, Integers
from tknp_loadgen.run.records import STATUSES

Mask = NDArray[np.bool_]
_TIMES = (
    "scheduled_s", "released_s", "lag_s", "permitted_s", "first_token_s", "last_token_s", "ended_s",
    "max_gap_s", "prompt_tokens", "queue_s", "prefill_s", "server_ttft_s",
)  # fmt: skip
_COUNTS = (
    "row", "wanted_tokens", "completion_tokens", "counted_tokens", "first_chunk_tokens", "chunks",
)  # fmt: skip
# Ended by the client on purpose: they say nothing about the server.
DELIBERATE = ("cancelled", "interrupted")


@dataclass(frozen=True)
class Columns:
    """`floats`: seconds from release, NaN where there is nothing; `counts`: whole numbers."""

    floats: dict[str, Floats]
    counts: dict[str, Integers]
    status: Integers  # index into STATUSES
    errors: Counter[str]
    retries: int
    answers_checked: int
    answers_found: int

    def __len__(self) -> int:
        return len(self.status)

    def __getitem__(self, name: str) -> Floats:
        return self.floats[name]

    @property
    def row(self) -> Integers:
        return self.counts["row"]

    @property
    def ok(self) -> Mask:
        result: Mask = self.status == STATUSES.index("ok")
        return result

    @property
    def scheduled(self) -> Mask:
        """Requests that the server had to answer: all but those ended by the client on purpose."""
        result: Mask = ~np.isin(self.status, [STATUSES.index(name) for name in DELIBERATE])
        return result

    def by_status(self) -> dict[str, int]:
        return {name: int((self.status == i).sum()) for i, name in enumerate(STATUSES)}


def record_files(directory: Path) -> list[Path]:
    """The requests files of a run; raises FileError where there are none."""
    found = sorted(directory.glob("requests*.jsonl"))
    if not found:
        raise FileError(directory, 0, "holds no requests*.jsonl: not the output of a run")
    return found


def read_columns(directory: Path) -> Columns:
    """Read all records; raises FileError for what isn't one, and for a row that ended twice."""
    floats: dict[str, list[float]] = {name: [] for name in _TIMES}
    counts: dict[str, list[int]] = {name: [] for name in _COUNTS}
    status: list[int] = []
    errors: Counter[str] = Counter()
    retries = checked = found = 0
    for path in record_files(directory):
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    record: dict[str, Any] = json.loads(line)
                    status.append(STATUSES.index(record["status"]))
                    for name, counted in counts.items():
                        counted.append(int(record[name]))
                    for name, timed in floats.items():
                        value = record.get(name)
                        timed.append(np.nan if value is None else float(value))
                except (ValueError, KeyError, TypeError) as error:
                    raise FileError(path, number, f"not a record of a request: {error!r}") from None
                if "error" in record and record["status"] not in DELIBERATE:
                    errors[f"{record['status']}: {record['error']}"] += 1
                retries += int(record.get("retries", 0))
                if "answer_found" in record and record["status"] == "ok":
                    checked += 1
                    found += bool(record["answer_found"])
    rows = np.array(counts["row"], np.int64)
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise FileError(directory, 0, f"row {ordered[twice[0]]} has two records")
    return Columns(
        {name: np.array(values, np.float64)[order] for name, values in floats.items()},
        {name: np.array(values, np.int64)[order] for name, values in counts.items()},
        np.array(status, np.int64)[order], errors, retries, checked, found,
    )  # fmt: skip
