"""`tknp-load merge`: slices of one run, put together."""

from __future__ import annotations

from pathlib import Path

import click

from tknp_loadgen.cli.text import print_summary
from tknp_loadgen.merge import merge
from tknp_loadgen.report.page import write_report


@click.command("merge")
@click.argument("runs", nargs=-1, required=True,
                type=click.Path(exists=True, file_okay=False, path_type=Path))  # fmt: skip
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True)
def command(runs: tuple[Path, ...], output: Path) -> None:
    """Merge the results of `run --slice K/N` on several machines."""
    result = merge(runs, output)
    write_report([result], output)
    print_summary(result.summary)
