"""`tknp-load report`: one page, a picture and a table of one run or several."""

from __future__ import annotations

from pathlib import Path

import click

from tknp_loadgen.measure.result import read_result
from tknp_loadgen.report.page import write_report


@click.command("report")
@click.argument("runs", nargs=-1, required=True,
                type=click.Path(exists=True, file_okay=False, path_type=Path))  # fmt: skip
@click.option("--output", type=click.Path(file_okay=False, path_type=Path),
              help="Where to write; by default the first run's directory.")  # fmt: skip
def command(runs: tuple[Path, ...], output: Path | None) -> None:
    """Write report.html, report.png and report.csv.

    The page is one file and asks nothing of the network.
    """
    for path in write_report([read_result(run) for run in runs], output or runs[0]):
        click.echo(path)
