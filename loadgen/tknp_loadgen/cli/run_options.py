"""The options that describe a run, shared by `run` and `sweep`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tknp_loadgen.run.plan import Load
from tknp_loadgen.run.settings import RunSettings
from tknp_loadgen.target.factory import TargetSettings

F = TypeVar("F", bound=Callable[..., Any])
FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)


class Words(click.ParamType[tuple[str, ...]]):
    """Words separated by spaces or commas."""

    name = "key:ms ..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        return value if isinstance(value, tuple) else tuple(value.replace(",", " ").split())


class Slice(click.ParamType[tuple[int, int]]):
    """K/N"""

    name = "k/n"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            part, parts = value.split("/")
            return int(part), int(parts)
        except ValueError:
            self.fail(f"{value!r}: write K/N, such as 0/4", param, ctx)


class Json(click.ParamType[dict[str, Any]]):
    """A JSON object."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            found = json.loads(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail(f"{value!r} is not a JSON object", param, ctx)
        return found


OPTIONS = (
    click.option("--target", "url", required=True, metavar="URL",
                 help="grpc://HOST:PORT, or http://HOST:PORT/v1; grpcs and https use TLS."),
    click.option("--model", default="", help="Name that an HTTP server knows its model by."),
    click.option("--endpoint", type=click.Choice(["completions", "chat"]), default="completions",
                 show_default=True, help="Of an HTTP server."),
    click.option("--goodput", type=Words(), multiple=True,
                 help="SLO, such as ntpot:100 or 'ttft:2000 tpot:50'; asked for, it decides the "
                 "exit code. Default: ntpot:100 is reported."),
    click.option("--slo-target", type=float, default=0.9, show_default=True,
                 help="Share of requests that must keep it."),
    click.option("--request-timeout", "request_timeout_s", type=float,
                 help="Seconds from scheduled arrival; none by default."),
    click.option("--max-concurrency", type=int,
                 help="Hold requests back; their waiting still counts."),
    click.option("--cancel-rate", type=float, default=0.0, help="Share cancelled on purpose."),
    click.option("--cancel-after-s", type=float, default=1.0, show_default=True),
    click.option("--num-warmups", type=int, default=1, show_default=True,
                 help="Requests before the run, with other prompts."),
    click.option("--connections", type=int, help="HTTP connections to open beforehand."),
    click.option("--processes", type=int, default=1, show_default=True,
                 help="Workers that share the schedule; 0: as many as the rate needs."),
    click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True,
                 help="Answers of exactly the trace's length, or up to it."),
    click.option("--chunk-usage/--no-chunk-usage", default=True, show_default=True,
                 help="Ask HTTP servers for token counts in every chunk."),
    click.option("--extra-body", type=Json(), default={}, help="Merged into HTTP requests."),
    click.option("--token-file", type=FILE, help="Holds the bearer token to show."),
    click.option("--tls-ca", type=FILE, help="PEM certificates to trust."),
    click.option("--max-error-rate", type=float, help="Stop above it, exit code 5."),
    click.option("--until-saturated", is_flag=True,
                 help="Stop once recent requests miss the SLO more often than the target allows."),
    click.option("--metrics-url", "metrics_urls", multiple=True, metavar="URL",
                 help="Prometheus endpoint of the server to scrape; may be repeated."),
    click.option("--metrics-interval-s", type=float, default=1.0, show_default=True),
    click.option("--max-lag-ms", type=float,
                 help="p99 lag that makes a run invalid. Default: 5 ms, or 1% of median TTFT."),
)  # fmt: skip


def run_options(function: F) -> F:
    """All of a run but its trace and output; `run_settings` takes the keywords."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def run_settings(output: Path, values: dict[str, Any], **more: Any) -> RunSettings:
    """Settings of a run from options' values; `more` are fields of RunSettings or of Load."""
    load = Load(
        request_timeout_s=values["request_timeout_s"], max_concurrency=values["max_concurrency"],
        cancel_rate=values["cancel_rate"], cancel_after_s=values["cancel_after_s"],
        num_warmups=values["num_warmups"], connections=values["connections"],
        slice=more.pop("slice", (0, 1)), text_file=more.pop("text_file", None),
        any_length=not values["ignore_eos"],
    )  # fmt: skip
    target = TargetSettings(
        values["url"], values["model"], values["endpoint"] == "chat", values["ignore_eos"],
        values["chunk_usage"], values["extra_body"], values["token_file"], values["tls_ca"],
    )  # fmt: skip
    return RunSettings(
        target, output, load, tuple(word for words in values["goodput"] for word in words),
        values["slo_target"], values["processes"], values["max_error_rate"],
        values["until_saturated"], values["metrics_urls"], values["metrics_interval_s"],
        max_lag_ms=values["max_lag_ms"], **more,
    )  # fmt: skip
