"""`tknp-load compare`: runs of one trace, request by request."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tknp_loadgen.cli.text import number
from tknp_loadgen.compare import compare
from tknp_loadgen.measure.jsonio import dumps
from tknp_loadgen.measure.result import read_result

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("compare")
@click.argument("runs", nargs=-1, type=DIRECTORY, required=True)
@click.option("--json", "as_json", is_flag=True)
def command(runs: tuple[Path, ...], as_json: bool) -> None:
    """Compare runs of the same trace with the first one, request by request."""
    said = compare([read_result(path) for path in runs])
    if as_json:
        click.echo(dumps(said))
        return
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 110)
    for run in said["runs"]:
        console.print(_table(said["base"], run))
        console.print(
            f"{run['paired']} requests completed in both; failed {run['failed'][0]} and "
            f"{run['failed'][1]}; SLO {run['attained_ratio'][0]:.1%} and "
            f"{run['attained_ratio'][1]:.1%} (good only in {said['base']}: "
            f"{run['good_only_in_base']}, only in {run['name']}: {run['good_only_in_run']}); "
            f"{number(run['throughput_tokens_per_s'][0])} and "
            f"{number(run['throughput_tokens_per_s'][1])} tokens/s"
        )


def _table(base: str, run: Mapping[str, Any]) -> Table:
    table = Table(title=f"{run['name']} against {base}", box=SIMPLE_HEAD, title_justify="left")
    for name in ("", base, run["name"], "difference", "95% interval", "ratio", "faster"):
        table.add_column(name, justify="right" if name else "left")
    for name, values in run["metrics"].items():
        share = values["faster_ratio"]
        table.add_row(
            name, number(values["base_mean"]), number(values["run_mean"]),
            number(values["difference"]),
            f"{number(values['ci_low'])} .. {number(values['ci_high'])}",
            number(values["ratio"]), "-" if share is None else f"{share:.0%}",
        )  # fmt: skip
    return table
