"""`tknp status`: the state of a pool, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tknp.cli.options import client_for, target_options
from tknp.cli.output import NOTHING, blocks_text, out, plain, plural, seconds_text, size_text
from tknp.cli.readiness import phase_text
from tknp.client import Client
from tknp.v1 import common_pb2
from tknp.v1.common_pb2 import Progress
from tknp.v1.coordinator_pb2 import NodeStatus, Status, StreamStatus

BAR_WIDTH = 14


def title(status: Status) -> Text:
    """Whether the pool is ready, what it serves and how; two lines."""
    style = "green" if status.ready else "yellow"
    if status.phase == common_pb2.PHASE_FAILED:
        style = "red"
    nodes = f"{plural(len(status.nodes), 'node')} x TP {status.tp}"
    copies = f"{status.copies} copies" if status.copies > 1 else ""
    streams = f"{len(status.streams)} streams" if len(status.streams) > 1 else ""
    facts = (
        phase_text(status.phase), status.dtype, status.strategy.upper(), nodes, copies, streams,
        f"epoch {status.epoch}",
    )  # fmt: skip
    return (
        Text("● ", style=style)
        .append(status.model, style="default bold")
        .append("\n  " + " · ".join(fact for fact in facts if fact), style="default not bold")
    )


def kv_bar(node: NodeStatus, width: int, share: bool = False) -> Text:
    """A bar of the pages in use; `share`: also as a percentage. Nothing for a node without KV."""
    if not node.capacity_tokens:
        return Text(NOTHING)
    used = node.used_pages / max(1, node.pages)
    filled = min(width, round(used * width))
    style = "red" if used > 0.95 else "yellow" if used > 0.8 else "green"
    bar = Text("\u2501" * filled, style=style)
    bar.append("\u2501" * (width - filled), style="bright_black")
    return bar.append(f" {used:4.0%}", style=style) if share else bar


def kv_text(node: NodeStatus) -> Text:
    """A bar of the pages in use; below it, tokens written of capacity."""
    bar = kv_bar(node, BAR_WIDTH)
    if node.capacity_tokens:
        bar.append(f"\n{node.kv_tokens:,} / {node.capacity_tokens:,}", style="dim")
    return bar


def _facts(what: str, progress: Progress, *facts: str) -> Text:
    """What a service does; below it, dimly, the rest, and its phase unless it is ready."""
    text = Text(what).append("\n")
    if progress.phase != common_pb2.PHASE_READY:
        text.append(f"{progress.error or phase_text(progress.phase)} · ", style="yellow")
    return text.append(" · ".join(facts), style="dim")


def services_table(status: Status) -> Table:
    """Each node and each prefill replica, two lines each, within 80 columns."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    table.add_column("service", no_wrap=True)
    table.add_column("roots")
    table.add_column("KV tokens", no_wrap=True)
    for column in ("requests", "step"):
        table.add_column(column, justify="right", no_wrap=True)
    for node in status.nodes:
        roots = blocks_text(node.blocks)
        table.add_row(
            f"node {node.node}",
            _facts(roots, node.progress, *node.addresses, size_text(node.weight_bytes)),
            kv_text(node), f"{node.requests:,}", seconds_text(node.step_s or None),
        )  # fmt: skip
    for index, replica in enumerate(status.prefill):
        sends = f"prompts, KV by {replica.kv_transfer or status.kv_transfer or NOTHING}"
        facts = _facts(sends, replica.progress, *replica.addresses)
        table.add_row(f"prefill {index}", facts, "", f"{replica.requests:,}", "")
    return table


def route_text(stream: StreamStatus) -> str:
    """Where the layers of a stream run: `0: layers 0-14, 1: layers 15-29`."""
    route = [f"{r.node}: {r.layer_start}-{r.layer_stop - 1}" for r in stream.roots]
    return f"node {', '.join(route)}" if route else "every layer on all nodes"


def streams_table(status: Status) -> Table:
    """What runs in each stream, and where its layers do."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    for column in ("stream", "layers at their roots"):
        table.add_column(column)
    for column in ("running", "steps"):
        table.add_column(column, justify="right", no_wrap=True)
    for stream in status.streams:
        table.add_row(
            f"stream {stream.stream}", route_text(stream), f"{stream.running:,}",
            f"{stream.steps:,}",
        )  # fmt: skip
    return table


def counts_text(status: Status) -> Text:
    """Requests by state, now and so far."""
    now = (
        f"{status.queued:,} queued · {status.prefilling:,} prefilling · {status.running:,} running"
    )
    past = (
        f"{status.completed:,} completed · {status.cancelled:,} cancelled · "
        f"{status.refused:,} refused · {status.failed:,} failed"
    )
    rest = f"{plural(status.steps, 'step')} · up {uptime_text(status.uptime_s)}"
    if status.preemptions:
        rest += f" · {status.preemptions:,} made room and were computed again"
    return Text(f"  {now}\n").append(f"  {past}\n  {rest}", style="dim")


def uptime_text(seconds: float) -> str:
    """1d 2h, 3h 4m, 5m 6s or 7s."""
    left = int(seconds)
    parts = [
        (left // 86400, "d"),
        (left // 3600 % 24, "h"),
        (left // 60 % 60, "m"),
        (left % 60, "s"),
    ]
    while len(parts) > 1 and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{value}{unit}" for value, unit in parts[:2])


def show(console: Console, status: Status) -> None:
    """The whole state of a pool."""
    limits = (
        f"  contexts up to {plural(status.max_model_len, 'token')}, pages of {status.page_size}"
    )
    parts: list[RenderableType] = [
        Text(), title(status), Text(limits, style="dim"), Text(), services_table(status), Text(),
    ]  # fmt: skip
    if len(status.streams) > 1:
        parts += [streams_table(status), Text()]
    parts.append(counts_text(status))
    if status.error:
        parts.append(Text(f"  {status.error}", style="red"))
    console.print(Group(*parts))


async def _status(connect: Callable[[], Client]) -> Status:
    async with connect() as client:
        return await client.status()


@click.command("status")
@target_options
@click.option("--json", "as_json", is_flag=True, help="Print every field as JSON.")
def command(as_json: bool, **server: Any) -> None:
    """Show nodes, KV load and requests of a running pool."""
    status = asyncio.run(_status(partial(client_for, **server)))
    if not as_json:
        show(out(), status)
        return
    click.echo(json.dumps(plain(status)))
