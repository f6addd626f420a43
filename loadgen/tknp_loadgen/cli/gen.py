"""`tknp-load gen`: write a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from tknp_loadgen.cli.trace_options import settings_from, trace_options
from tknp_loadgen.trace.build import build
from tknp_loadgen.trace.format import Trace


@click.command("gen")
@trace_options
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), required=True)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(output: Path, as_json: bool, **values: Any) -> None:
    """Write a trace: who sends what when, for any number of runs to replay.

    The same options and seed give the same bytes on any machine. Published traces are converted
    with --replay.
    """
    trace = build(settings_from(values))
    digest = trace.write(output)
    said = {"output": str(output), "sha256": digest, **describe(trace)}
    if as_json:
        click.echo(json.dumps(said))
        return
    for name, value in said.items():
        click.echo(f"{name:>20}  {value}")


def describe(trace: Trace) -> dict[str, Any]:
    """What a trace holds, in numbers."""
    inputs, outputs = trace.input_tokens, trace.output_tokens
    span_s = trace.span_s
    return {
        "requests": len(trace),
        "span_s": span_s,
        "mean_rate_per_s": round((len(trace) - 1) / span_s, 4) if span_s else None,
        "input_tokens_mean": round(float(inputs.mean()), 1),
        "input_tokens_median": float(np.median(inputs)),
        "input_tokens_sd": round(float(inputs.std()), 1),
        "input_tokens_min": int(inputs.min()),
        "input_tokens_max": int(inputs.max()),
        "output_tokens_mean": round(float(outputs.mean()), 1),
        "output_tokens_total": int(outputs.sum()),
        **{
            name: trace.generator["replay"][name]
            for name in ("malformed", "unserved")
            if "replay" in trace.generator
        },
    }
