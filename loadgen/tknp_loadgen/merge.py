"""Slices of one run, sent from several machines, put together as if one had sent them all."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import yaml

from tknp_loadgen.errors import InputError
from tknp_loadgen.measure.columns import record_files
from tknp_loadgen.measure.result import Result, read_config, read_result, write_summary
from tknp_loadgen.measure.tokens import token_files
from tknp_loadgen.run.supervisor import prepare_directory
from tknp_loadgen.trace.format import read_trace

MOST_SKEW_S = 1.0


def merge(directories: Sequence[Path], output: Path) -> Result:
    """Merge result directories into `output`.

    All must have run one trace, on disjoint rows, released within a second of each other by their
    own clocks (`--start-at`). Times stay relative to each machine's own release.
    """
    if not directories:
        raise InputError("runs", 0, "name the result directories of the slices")
    configs = [read_config(directory) for directory in directories]
    hashes = {str(config.get("trace_sha256")) for config in configs}
    if len(hashes) > 1:
        raise InputError("trace", sorted(hashes), "slices must be of one trace")
    starts = [float(config.get("released_at_unix_s") or 0.0) for config in configs]
    skew_s = max(starts) - min(starts)
    if skew_s > MOST_SKEW_S:
        raise InputError("start", f"{skew_s:.1f} s apart", "release slices together: --start-at")
    trace = read_trace(directories[0] / "trace.jsonl")
    prepare_directory(output)
    trace.write(output / "trace.jsonl")
    number = 0
    workers = []
    for directory, config in zip(directories, configs, strict=True):
        workers += [
            {**worker, "worker": number + i} for i, worker in enumerate(config.get("workers", ()))
        ]
        for records in record_files(directory):
            chunks = directory / records.name.replace("requests", "tokens").replace("jsonl", "bin")
            shutil.copyfile(records, output / f"requests.{number}.jsonl")
            if chunks in token_files(directory):
                shutil.copyfile(chunks, output / f"tokens.{number}.bin")
            number += 1
        scrapes = directory / "server_metrics.jsonl"
        if scrapes.exists():
            with (output / scrapes.name).open("a", encoding="utf-8") as file:
                file.write(scrapes.read_text(encoding="utf-8"))
    stopped = next((config["stopped"] for config in configs if config.get("stopped")), None)
    merged = configs[0] | {
        "slice": [0, 1], "workers": workers, "stopped": stopped, "name": output.name,
        "merged": [directory.name for directory in directories], "release_skew_s": skew_s,
    }  # fmt: skip
    (output / "config.yaml").write_text(yaml.safe_dump(merged, sort_keys=False))
    result = read_result(output)
    write_summary(result)
    return result
