"""What `tknp top` draws: one frame of a pool, for any width from 80 columns on.

● model                                   facts
output, TTFT, ITL                         a line of the last minute's speeds
a line a node: what it roots, its KV, requests, step
a line a prefill replica
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tknp.cli.output import NOTHING, blocks_text, seconds_text
from tknp.cli.readiness import phase_text
from tknp.cli.status import kv_bar, route_text, title, uptime_text
from tknp.cli.top_figures import Figures, History
from tknp.v1 import common_pb2
from tknp.v1.common_pb2 import Progress
from tknp.v1.coordinator_pb2 import Status

_TICKS = "▁▂▃▄▅▆▇█"
_WIDE = 110
_MOST_STREAMS = 4


def frame(history: History, width: int, trouble: str = "") -> RenderableType:
    """The newest look of `history`, of which there is one. `trouble`: what went wrong since."""
    look, figures = history.looks[-1], history.figures()
    status = look.status
    parts: list[RenderableType] = [
        title(status), Text(), _speeds(history, figures, width), _requests(status), Text(),
        _services(status, width), Text(),
    ]  # fmt: skip
    if 1 < len(status.streams) <= _MOST_STREAMS:
        parts += [_streams(status), Text()]
    for problem in (status.error, trouble, look.error):
        if problem:
            parts.append(Text(f"  {problem}", style="red", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def tick_line(values: Sequence[float], width: int) -> str:
    """The newest `width` values as bars, the highest full."""
    shown = list(values)[-width:]
    highest = max(shown, default=0.0)
    if highest <= 0:
        return _TICKS[0] * len(shown)
    return "".join(_TICKS[round(max(0.0, v) / highest * (len(_TICKS) - 1))] for v in shown)


def _speeds(history: History, figures: Figures, width: int) -> Table:
    """Speeds, their last minute, and latencies."""
    table = Table.grid(padding=(0, 2))
    mark = "~" if figures.estimated else ""
    ticks = tick_line(list(history.speeds()), min(40, width - 62))
    table.add_row(
        Text("  output", style="dim"), _number(figures.output_tokens_per_s, "tokens/s", mark),
        Text(ticks, style="cyan"),
    )  # fmt: skip
    prompt = _number(figures.prompt_tokens_per_s, "tokens/s")
    steps = _number(figures.steps_per_s, "steps/s", style="dim")
    table.add_row(Text("  prompt", style="dim"), prompt, steps)
    over = f"last {figures.window_s:.0f} s" if figures.window_s else ""
    for name, pair, aside in (("TTFT", figures.ttft_s, over), ("ITL", figures.itl_s, "")):
        table.add_row(Text(f"  {name}", style="dim"), _pair(pair), Text(aside, style="dim"))
    return table


def _number(value: float | None, unit: str, mark: str = "", style: str = "bold") -> Text:
    if value is None:
        return Text(NOTHING, style="dim")
    digits = 1 if value < 100 else 0
    return Text(f"{mark}{value:,.{digits}f}", style=style).append(f" {unit}", style="dim")


def _pair(pair: tuple[float, float] | None) -> Text:
    """p50 and p99."""
    if pair is None:
        return Text(NOTHING, style="dim")
    text = Text(f"{seconds_text(pair[0])}", style="bold").append(" p50  ", style="not bold dim")
    return text.append(seconds_text(pair[1]), style="bold").append(" p99", style="not bold dim")


def _requests(status: Status) -> Text:
    """Open requests by where they are, and those that ended."""
    text = Text("\n  ")
    for count, what, style in (
        (status.running, "running", "bold green"), (status.prefilling, "prefilling", "bold cyan"),
        (status.queued, "waiting", "bold yellow"),
    ):  # fmt: skip
        text.append(f"{count:,}", style=style if count else "dim").append(f" {what}   ", "dim")
    text.append(f"{status.completed:,} completed", "dim")
    if status.failed:
        text.append(f"   {status.failed:,} failed", "red")
    return text.append(f"   up {uptime_text(status.uptime_s)}", "dim")


def _services(status: Status, width: int) -> Table:
    """A line a node and a line a replica."""
    wide = width >= _WIDE
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim", expand=False)
    table.add_column("service", no_wrap=True)
    table.add_column("roots", no_wrap=True, overflow="ellipsis", max_width=36 if wide else 28)
    table.add_column("KV in use", no_wrap=True)
    columns = (*(("KV tokens",) if wide else ()), "requests", "step")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    bar = 20 if wide else 10
    for node in status.nodes:
        tokens = f"{node.kv_tokens:,} / {node.capacity_tokens:,}" if node.capacity_tokens else ""
        table.add_row(
            f"node {node.node}", _doing(blocks_text(node.blocks), node.progress),
            kv_bar(node, bar, share=True), *((tokens,) if wide else ()), f"{node.requests:,}",
            seconds_text(node.step_s or None),
        )  # fmt: skip
    for index, replica in enumerate(status.prefill):
        sends = f"prompts, {replica.kv_transfer or status.kv_transfer or NOTHING}"
        table.add_row(
            f"prefill {index}", _doing(sends, replica.progress), *(("", "") if wide else ("",)),
            f"{replica.requests:,}",
        )  # fmt: skip
    return table


def _doing(what: str, progress: Progress) -> Text:
    """What a service is for, or what keeps it from that."""
    if progress.phase == common_pb2.PHASE_READY:
        return Text(what)
    style = "red" if progress.phase == common_pb2.PHASE_FAILED else "yellow"
    return Text(progress.error or phase_text(progress.phase), style=style)


def _streams(status: Status) -> Table:
    """What runs in each stream, and where."""
    table = Table.grid(padding=(0, 2))
    for stream in status.streams:
        table.add_row(
            Text(f"  stream {stream.stream}", style="dim"), f"{stream.running:,} running",
            Text(route_text(stream), style="dim"),
        )  # fmt: skip
    return table
