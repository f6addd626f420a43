"""`tknp-load run`: send a trace and report."""

from __future__ import annotations

import asyncio
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from tknp_loadgen.cli.run_options import FILE, Slice, run_options, run_settings
from tknp_loadgen.cli.text import print_summary
from tknp_loadgen.measure.jsonio import dumps
from tknp_loadgen.run.live import LiveView, Silent, View
from tknp_loadgen.run.settings import RunSettings
from tknp_loadgen.run.supervisor import Outcome, supervise
from tknp_loadgen.trace.format import Trace, read_trace


def execute(trace: Trace, settings: RunSettings, title: str) -> Outcome:
    """Run with a live view where standard error is a terminal."""
    with ExitStack() as stack:
        view: View = Silent()
        if sys.stderr.isatty():
            view = stack.enter_context(LiveView(title, len(settings.load.rows(trace))))
        return asyncio.run(supervise(trace, settings, view))


@click.command("run")
@click.option("--trace", "path", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              required=True, help="File that `tknp-load gen` wrote.")  # fmt: skip
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True,
              help="Directory for records, summary and report.")  # fmt: skip
@run_options
@click.option("--slice", type=Slice(), default=(0, 1), help="Send rows K, K+N, ... only.")
@click.option("--start-at", type=float, help="Unix time of release, to start machines together.")
@click.option("--text-file", type=FILE, help="Where the text of a file trace is.")
@click.option("--name", help="What reports call this run.")
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write report.html.")
def command(
    path: Path, output: Path, slice: tuple[int, int], start_at: float | None,
    text_file: str | None, name: str | None, dry_run: bool, as_json: bool, report: bool,
    **values: Any,
) -> None:  # fmt: skip
    """Send a trace's requests when they are due, and write down what comes back.

    Exit codes: 0 good, 2 bad input, 3 SLO missed, 4 the client was the bottleneck, 5 errors above
    the limit, 130 interrupted.
    """
    trace = read_trace(path)
    settings = run_settings(
        output, values, slice=slice, start_at=start_at, text_file=text_file, name=name
    )
    if dry_run:
        rows = len(settings.load.rows(trace))
        click.echo(
            f"{rows} of {len(trace)} requests over {trace.span_s:.1f} s to {settings.target.url}, "
            f"{settings.workers(trace)} process(es), trace {trace.sha256[:12]}"
        )
        return
    outcome = execute(trace, settings, f"{path.name} to {settings.target.url}")
    if report:
        from tknp_loadgen.report.page import write_report

        write_report([outcome.result], output)
    if as_json:
        click.echo(dumps(dict(outcome.result.summary)))
    else:
        print_summary(outcome.result.summary)
    raise click.exceptions.Exit(int(outcome.exit))
