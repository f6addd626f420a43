"""`tknp-load validate`: check traces and result directories."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tknp_loadgen.check import check_result, check_trace


@click.command("validate")
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def command(paths: tuple[Path, ...]) -> None:
    """Check that traces are whole, and that results agree with their records."""
    for path in paths:
        click.echo(json.dumps(check_result(path) if path.is_dir() else check_trace(path)))
