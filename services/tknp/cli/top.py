"""`tknp top`: a pool, live in the terminal.

    every interval    GetStatus and, if there are any, the coordinator's metrics -> a Look
    a look            -> History -> a frame, or a line of JSON
    q, Ctrl-C         ends it, exit code 0

A pool that stops answering stays on the screen with the reason until it is back; only the first
look must come. Where output is no terminal, one frame is printed, as with --once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.text import Text

from tknp.cli.options import FILE, client_for, target_options
from tknp.cli.output import out, plain
from tknp.cli.top_figures import History, Look
from tknp.cli.top_keys import keys
from tknp.cli.top_metrics import MetricsReader, context_of
from tknp.cli.top_view import frame
from tknp.client import Client
from tknp.errors import TknpError, Unavailable

_ENDING = ("q", "Q")


class Watched:
    """A pool that is looked at again and again."""

    def __init__(self, client: Client, metrics: MetricsReader) -> None:
        self._client, self._metrics = client, metrics
        self.history = History()

    async def look(self) -> None:
        """Add what the pool says now. Raises TknpError when it doesn't answer."""
        status = await self._client.status()
        scrape, error = None, ""
        try:
            scrape = await self._metrics.scrape()
        except Unavailable as failure:
            error = str(failure)
        self.history.add(Look(time.monotonic(), status, scrape, error))

    async def looks(self, interval_s: float) -> AsyncIterator[str]:
        """Look every `interval_s`, for ever; gives what is wrong with the newest look, or ""."""
        while True:
            started_s = time.monotonic()
            try:
                await self.look()
                yield ""
            except TknpError as error:
                if not self.history.looks:
                    raise
                yield str(error)
            await asyncio.sleep(max(0.0, started_s + interval_s - time.monotonic()))

    def plain(self) -> dict[str, Any]:
        """The newest look for JSON."""
        look = self.history.looks[-1]
        return {"figures": asdict(self.history.figures()), "status": plain(look.status)}


def _shown(console: Console, watched: Watched, trouble: str) -> RenderableType:
    return frame(watched.history, console.width, trouble)


async def _live(console: Console, watched: Watched, interval_s: float) -> None:
    """Draw until a key ends it."""
    with (
        keys() as typed,
        Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
    ):

        async def draw() -> None:
            async for trouble in watched.looks(interval_s):
                hint = Text(f"  q quits · every {interval_s:g} s", style="dim")
                shown = Padding(_shown(console, watched, trouble), (1, 0, 0, 1))
                live.update(Group(shown, hint), refresh=True)

        drawing = asyncio.create_task(draw())
        try:
            while not drawing.done():
                key = asyncio.create_task(typed.get())
                await asyncio.wait((drawing, key), return_when=asyncio.FIRST_COMPLETED)
                if not key.done():
                    key.cancel()
                elif key.result() in _ENDING:
                    return
            drawing.result()
        finally:
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)


async def _top(
    connect: partial[Client], metrics: MetricsReader, interval_s: float, once: bool, as_json: bool
) -> None:
    console = out()
    async with connect() as client:
        watched = Watched(client, metrics)
        if as_json and not once:
            async for trouble in watched.looks(interval_s):
                if not trouble:
                    click.echo(json.dumps(watched.plain()))
        elif console.is_terminal and not once:
            await _live(console, watched, interval_s)
        else:
            await watched.look()
            await asyncio.sleep(interval_s)
            await watched.look()
            if as_json:
                click.echo(json.dumps(watched.plain()))
            else:
                console.print(_shown(console, watched, ""))


@click.command("top")
@target_options
@click.option(
    "--metrics",
    default="",
    metavar="HOST:PORT|URL",
    help="Metrics of the coordinator; unset: port 9400 of its host, if they are there.",
)
@click.option("--metrics-cert", type=FILE, help="PEM certificate to show for metrics.")
@click.option("--metrics-key", type=FILE, help="PEM key of that certificate.")
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two looks.",
)
@click.option("--once", is_flag=True, help="Print one frame, after one interval, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON a look instead.")
def command(
    metrics: str, metrics_cert: str | None, metrics_key: str | None, interval_s: float,
    once: bool, as_json: bool, **server: Any,
) -> None:  # fmt: skip
    """Watch a pool: nodes, KV load, requests, speed, latencies.

    Tokens a second marked ~ are estimated from steps; TTFT and ITL need the coordinator's metrics.
    """
    tls = context_of(server["tls_ca"], metrics_cert, metrics_key) if metrics_cert else None
    reader = MetricsReader(metrics, server["target"], tls)
    with suppress(KeyboardInterrupt):
        asyncio.run(_top(partial(client_for, **server), reader, interval_s, once, as_json))
