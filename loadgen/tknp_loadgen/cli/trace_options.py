"""The options that describe a trace, shared by `gen` and `sweep`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tknp_loadgen.trace.arrivals import KINDS, Arrivals
from tknp_loadgen.trace.build import PromptSettings, ReplaySettings, Settings
from tknp_loadgen.trace.lengths import KINDS as LENGTH_KINDS
from tknp_loadgen.trace.lengths import Lengths
from tknp_loadgen.trace.public import FORMATS

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Pieces(click.ParamType[tuple[tuple[float, float], ...]]):
    """RATE:SECONDS,RATE:SECONDS,..."""

    name = "rate:seconds,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[float, float], ...]:
        if isinstance(value, tuple):
            return value
        try:
            pairs = [part.split(":") for part in value.split(",")]
            return tuple((float(rate), float(seconds)) for rate, seconds in pairs)
        except ValueError:
            self.fail(f"{value!r}: write RATE:SECONDS,RATE:SECONDS", param, ctx)


class IdRange(click.ParamType[tuple[int, int]]):
    """FIRST:LAST"""

    name = "first:last"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            first, last = value.split(":")
            return int(first), int(last)
        except ValueError:
            self.fail(f"{value!r}: write FIRST:LAST", param, ctx)


ARRIVALS = (
    click.option("--arrivals", type=click.Choice(KINDS), default="poisson", show_default=True),
    click.option("--request-rate", type=float, default=1.0, show_default=True,
                 help="Requests a second (constant, poisson, gamma, ramp from, diurnal mean)."),
    click.option("--burstiness", type=float, default=1.0, show_default=True,
                 help="Shape of gamma gaps: 1 is Poisson, less is burstier."),
    click.option("--burst-size", type=int, default=0, help="Requests of one burst of a train."),
    click.option("--burst-interval-s", type=float, default=0.0, help="Between bursts of a train."),
    click.option("--final-rate", type=float, default=0.0, help="Where a ramp ends."),
    click.option("--ramp-shape", type=click.Choice(["linear", "exponential"]), default="linear"),
    click.option("--ramp-s", type=float, default=0.0, help="How long a ramp takes."),
    click.option("--rates", "pieces", type=Pieces(), default=(),
                 help="Piecewise rates; the last one goes on."),
    click.option("--swing", type=float, default=0.5, help="Relative height of a diurnal wave."),
    click.option("--period-s", type=float, default=86400.0, help="Of a diurnal wave."),
    click.option("--users", type=int, default=0, help="Of a closed loop."),
    click.option("--think-s", type=float, default=0.0, help="Mean pause of a closed loop's user."),
)  # fmt: skip
OTHERS = (
    click.option("--num-prompts", type=click.IntRange(min=1), help="Requests."),
    click.option("--duration-s", type=float, help="Instead: about as many as come in that time."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True),
    click.option("--lengths", type=click.Choice(LENGTH_KINDS), default="fixed", show_default=True),
    click.option("--input-tokens", type=int, default=512, show_default=True,
                 help="Fixed length, or median of lognormal ones."),
    click.option("--output-tokens", type=int, help="Same; default 1024 for paper-mixed, else 128."),
    click.option("--sigma", type=float, default=1.0, show_default=True,
                 help="Deviation of the logarithm of lognormal lengths."),
    click.option("--lengths-file", type=FILE, help="CSV of empirical lengths."),
    click.option("--length-scale", type=float, default=1.0, show_default=True,
                 help="Multiplies input lengths, for models with a short context."),
    click.option("--output-scale", type=float, default=1.0, show_default=True),
    click.option("--max-tokens", type=int, help="Cut prompts so that they fit with their answer."),
    click.option("--prompts", type=click.Choice(["ids", "text", "needle", "file"]), default="ids",
                 show_default=True, help="Random token ids, synthetic text, needle tasks, a file."),
    click.option("--token-ids", type=IdRange(), default=(1000, 31999), show_default="1000:31999",
                 help="Range that ids are drawn from."),
    click.option("--tokenizer", metavar="PATH|URL",
                 help="Counts tokens of text: a directory or tokenizer.json, grpc:// or http://."),
    click.option("--text-file", type=FILE, help="Source of file prompts."),
    click.option("--prefix-groups", type=int, default=0, help="Groups that share a prefix."),
    click.option("--prefix-ratio", type=float, default=0.5, show_default=True,
                 help="Share of a prompt that its group has in common."),
    click.option("--replay", type=FILE, help="Published trace to take arrivals and lengths from."),
    click.option("--format", type=click.Choice(FORMATS), default="auto", help="Of that file."),
    click.option("--time-scale", type=float, default=1.0, help="Multiplies its arrival times."),
    click.option("--clip-s", type=float, help="Leaves out what arrives later."),
    click.option("--dejitter", is_flag=True, help="Spreads arrivals that share a timestamp."),
    click.option("--skip-malformed", is_flag=True, help="Counts bad rows instead of refusing."),
    click.option("--prefixes", is_flag=True, help="Keeps Mooncake's prefix sharing."),
)  # fmt: skip


def _apply(function: F, options: tuple[Callable[[F], F], ...]) -> F:
    for option in reversed(options):
        function = option(function)
    return function


def trace_options(function: F) -> F:
    """All of a trace; `settings_from` takes the keywords."""
    return _apply(function, (*ARRIVALS, *OTHERS))


def length_options(function: F) -> F:
    """A trace without its arrivals, which a sweep sets."""
    return _apply(function, OTHERS)


def settings_from(values: dict[str, Any], arrivals: Arrivals | None = None) -> Settings:
    """Settings of a trace from options' values."""
    replay: Path | None = values["replay"]
    return Settings(
        arrivals=arrivals or arrivals_from(values),
        lengths=Lengths(
            values["lengths"], values["input_tokens"], values["output_tokens"], values["sigma"],
            values["lengths_file"], values["length_scale"], values["output_scale"],
            values["max_tokens"],
        ),
        prompts=PromptSettings(
            values["prompts"], values["token_ids"], values["tokenizer"], values["text_file"],
            values["prefix_groups"], values["prefix_ratio"],
        ),
        replay=ReplaySettings(
            replay, values["format"], values["time_scale"], values["clip_s"], values["dejitter"],
            values["skip_malformed"], values["prefixes"],
        ) if replay else None,
        num_prompts=values["num_prompts"],
        duration_s=values["duration_s"],
        seed=values["seed"],
    )  # fmt: skip


def arrivals_from(values: dict[str, Any]) -> Arrivals:
    return Arrivals(
        values["arrivals"], values["request_rate"], values["burstiness"], values["burst_size"],
        values["burst_interval_s"], values["final_rate"], values["ramp_shape"], values["ramp_s"],
        values["pieces"], values["swing"], values["period_s"], values["users"], values["think_s"],
    )  # fmt: skip
