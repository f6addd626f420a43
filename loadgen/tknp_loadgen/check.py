"""What `validate` looks for: files that are whole and agree with each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tknp_loadgen.errors import FileError
from tknp_loadgen.measure.jsonio import dumps
from tknp_loadgen.measure.result import read_result
from tknp_loadgen.measure.tokens import CHUNK_TYPE, token_files
from tknp_loadgen.trace.format import read_trace


def check_trace(path: Path) -> dict[str, Any]:
    """Read it; raises FileError."""
    trace = read_trace(path)
    return {"trace": str(path), "sha256": trace.sha256, "requests": len(trace)}


def check_result(directory: Path) -> dict[str, Any]:
    """Records against trace, tokens against records, summary.json against both."""
    result = read_result(directory)
    columns = result.columns
    counted = np.zeros(len(result.trace), np.int64)
    for path in token_files(directory):
        chunks = np.fromfile(path, CHUNK_TYPE)
        np.add.at(counted, chunks["row"].astype(np.int64), chunks["tokens"])
    wrong = np.flatnonzero(counted[columns.row] != columns.counts["counted_tokens"])
    if len(wrong):
        row = int(columns.row[wrong[0]])
        raise FileError(directory, 0, f"row {row} has {counted[row]} tokens in tokens.*.bin, but "
                        f"{columns.counts['counted_tokens'][wrong[0]]} in its record")  # fmt: skip
    path = directory / "summary.json"
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FileError(path, 0, f"can't be read: {error}") from error
    made = json.loads(dumps(dict(result.summary)))
    if (written_version := written.get("schema_version")) != made["schema_version"]:
        raise FileError(path, 0, f"schema version {written_version!r}, not "
                        f"{made['schema_version']}")  # fmt: skip
    for key, value in made.items():
        if written.get(key) != value:
            raise FileError(path, 0, f"{key} is not what the records give")
    return {
        "result": str(directory), "trace_sha256": result.trace.sha256, "records": len(columns),
        "valid": result.summary["valid"],
    }  # fmt: skip
