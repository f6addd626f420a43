"""`tknp-load sweep`: the same lengths under several loads, or a search for the highest rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tknp_loadgen.cli.run import execute
from tknp_loadgen.cli.run_options import run_options, run_settings
from tknp_loadgen.cli.text import number, print_summary
from tknp_loadgen.cli.trace_options import length_options, settings_from
from tknp_loadgen.errors import Exit, InputError
from tknp_loadgen.measure.jsonio import dumps
from tknp_loadgen.measure.result import Result
from tknp_loadgen.report.page import write_report
from tknp_loadgen.sweep import search
from tknp_loadgen.trace.arrivals import Arrivals
from tknp_loadgen.trace.build import build

BURST = "burst"


class _Sweep:
    """Builds a trace for each load and runs it into a directory of its own."""

    def __init__(self, output: Path, values: dict[str, Any], text_file: str | None) -> None:
        self._output, self._values, self._text_file = output, values, text_file
        self.results: list[Result] = []
        self.exits: list[Exit] = []

    def run(
        self, label: str, arrivals: Arrivals, seed: int = 0, num_prompts: int | None = None
    ) -> Result:
        settings = settings_from(self._values, arrivals)
        settings = replace(
            settings, seed=settings.seed + seed, num_prompts=num_prompts or settings.num_prompts
        )
        directory = self._output / (label if not seed else f"{label}-try-{seed + 1}")
        directory.parent.mkdir(parents=True, exist_ok=True)
        run = run_settings(directory, self._values, name=directory.name, text_file=self._text_file)
        outcome = execute(build(settings), run, directory.name)
        self.results.append(outcome.result)
        self.exits.append(outcome.exit)
        print_summary(outcome.result.summary)
        if outcome.exit == Exit.INTERRUPTED:
            raise click.exceptions.Exit(int(outcome.exit))
        return outcome.result


@click.command("sweep")
@length_options
@run_options
@click.option("--request-rates", help="Comma-separated Poisson rates; `burst` is one of them.")
@click.option("--batch-sizes", help="Comma-separated sizes of synchronized bursts.")
@click.option("--search", "bounds", metavar="LOW:HIGH",
              help="Find the highest Poisson rate between these that keeps the SLO.")  # fmt: skip
@click.option("--precision", type=float, default=0.1, show_default=True,
              help="Of the search, as a ratio.")  # fmt: skip
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True)
def command(
    request_rates: str | None, batch_sizes: str | None, bounds: str | None, precision: float,
    output: Path, **values: Any,
) -> None:  # fmt: skip
    """Run several loads one after the other and report on all of them.

    Every load has a trace of its own, made with the same seed and lengths; a search that is not
    sure of a rate tries it again with other seeds. The page that compares them is report.html.
    """
    text_file = str(values["text_file"].resolve()) if values["text_file"] else None
    sweep = _Sweep(output, values, text_file)
    if sum(option is not None for option in (request_rates, batch_sizes, bounds)) != 1:
        raise click.UsageError("give one of --request-rates, --batch-sizes and --search")
    said: dict[str, Any] = {}
    if request_rates is not None:
        for word in request_rates.split(","):
            sweep.run(f"rate-{word.strip()}", _arrivals(word.strip()))
    elif batch_sizes is not None:
        for word in batch_sizes.split(","):
            size = int(_positive("batch_sizes", word))
            sweep.run(f"batch-{size}", Arrivals(BURST), num_prompts=size)
    else:
        said = _search(sweep, str(bounds), precision, values["slo_target"])
    said |= {"runs": [dict(result.summary) for result in sweep.results]}
    (output / "sweep.json").write_text(dumps(said) + "\n", encoding="utf-8")
    for path in write_report(sweep.results, output):
        click.echo(path)
    raise click.exceptions.Exit(_exit(sweep.exits))


def _search(sweep: _Sweep, bounds: str, precision: float, target: float) -> dict[str, Any]:
    low, _, high = bounds.partition(":")

    def probe(rate: float, attempt: int) -> tuple[int, int]:
        result = sweep.run(f"rate-{rate:.4g}", Arrivals("poisson", rate=rate), attempt)
        slo = result.summary["slo"]
        return slo["good"], slo["scheduled"]

    found = search(
        probe, _positive("search", low), _positive("search", high), target, precision
    ).describe()
    met, missed = found["highest_rate_met_per_s"], found["lowest_rate_missed_per_s"]
    sure = "" if found["confident"] else " (not every rate was decided with 95% confidence)"
    if met is None:
        click.echo(f"Not even {number(missed)} requests/s keep the SLO{sure}.")
    elif missed is None:
        click.echo(f"Even {number(met)} requests/s keep the SLO{sure}: search higher.")
    else:
        click.echo(f"{number(met)} requests/s keep the SLO, {number(missed)} do not{sure}.")
    return {"search": found}


def _arrivals(word: str) -> Arrivals:
    return (
        Arrivals(BURST)
        if word == BURST
        else Arrivals("poisson", rate=_positive("request_rates", word))
    )


def _positive(name: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise InputError(name, word, "must be a number above 0")
    return value


def _exit(exits: list[Exit]) -> int:
    """A missed SLO is what a sweep looks for; an unusable run is not."""
    for code in (Exit.TOO_MANY_ERRORS, Exit.INVALID_RUN):
        if code in exits:
            return int(code)
    return int(Exit.GOOD)
