"""A result directory: what is in it, and its summary made from it.

config.yaml  trace.jsonl  requests.K.jsonl  tokens.K.bin  server_metrics.jsonl
summary.json  summary.csv  report.html  report.png
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tknp_loadgen.errors import FileError
from tknp_loadgen.measure.columns import Columns, read_columns
from tknp_loadgen.measure.jsonio import dumps
from tknp_loadgen.measure.server import read_scrapes, server_summary
from tknp_loadgen.measure.slo import DEFAULT, Slo
from tknp_loadgen.measure.summary import summarize
from tknp_loadgen.measure.tokens import Tokens, read_tokens
from tknp_loadgen.run.plan import Load
from tknp_loadgen.trace.format import Trace, read_trace


@dataclass(frozen=True)
class Result:
    """One run, read back from its directory."""

    directory: Path
    config: Mapping[str, Any]
    trace: Trace
    columns: Columns
    tokens: Tokens
    summary: Mapping[str, Any]

    @property
    def slo(self) -> Slo:
        return Slo.parse(self.config.get("goodput") or DEFAULT)

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.directory.name)


def read_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise FileError(path, 0, f"not the output of a run: {error}") from error
    if not isinstance(config, dict):
        raise FileError(path, 1, "not a mapping")
    return config


def read_result(directory: Path) -> Result:
    """Read a run and make its summary anew; raises FileError for what does not fit together."""
    config = read_config(directory)
    trace = read_trace(directory / "trace.jsonl")
    if config.get("trace_sha256") != trace.sha256:
        raise FileError(directory / "config.yaml", 0, "names another trace than trace.jsonl")
    columns = read_columns(directory)
    if len(columns) and int(columns.row[-1]) >= len(trace):
        raise FileError(directory, 0, f"has a record of row {columns.row[-1]}, beyond the trace")
    tokens = read_tokens(directory, columns)
    load = Load(slice=tuple(config.get("slice", (0, 1))))
    summary = summarize(
        columns, tokens, Slo.parse(config.get("goodput") or DEFAULT),
        slo_target=float(config.get("slo_target", 0.9)), trace_rows=len(load.rows(trace)),
        input_tokens=trace.input_tokens, workers=config.get("workers", ()),
        max_lag_ms=config.get("max_lag_ms"),
    )  # fmt: skip
    arrivals = trace.generator.get("arrivals") or trace.generator.get("replay") or {}
    said = {
        "name": config.get("name") or directory.name, "trace_sha256": trace.sha256,
        "arrivals": dict(arrivals), "target": config.get("target"),
        "stopped": config.get("stopped"),
    }  # fmt: skip
    server = server_summary(read_scrapes(directory / "server_metrics.jsonl"))
    return Result(directory, config, trace, columns, tokens, {**said, **summary, "server": server})


def write_summary(result: Result) -> None:
    """Write summary.json and summary.csv."""
    text = dumps(dict(result.summary)) + "\n"
    (result.directory / "summary.json").write_text(text, encoding="utf-8")
    with (result.directory / "summary.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(("measure", "value"))
        rows.writerows(flat(result.summary))


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Nested values as (dotted.name, value)."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flat(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        yield name, json.dumps(value)
    else:
        yield name, value
