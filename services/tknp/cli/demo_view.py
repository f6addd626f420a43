"""What `tknp demo` shows while answers stream in, and after.

On a terminal each prompt has a panel that follows the end of its answer. Elsewhere answers come as
whole lines, each behind the number of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tknp.cli.output import NOTHING, blocks_text, plural, printable, seconds_text
from tknp.client import Completion
from tknp.v1.coordinator_pb2 import Status

COLUMNS = 2
REFRESH_A_SECOND = 10
LINE_WIDTH = 76
NARROWEST_PANEL = 24
LOWEST_PANEL = 4


class View(Protocol):
    """Receives the texts of numbered prompts as they stream."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def add(self, index: int, text: str) -> None: ...
    def end(self, index: int, outcome: str, good: bool) -> None: ...


class Lines:
    """Interleaved lines for a log: `[3] text`."""

    def __init__(self, console: Console, prompts: Sequence[str]) -> None:
        self._console = console
        self._prompts = prompts
        self._pending = [""] * len(prompts)

    def __enter__(self) -> object:
        for index, prompt in enumerate(self._prompts):
            self._print(index, f"> {prompt}")
        return self

    def __exit__(self, *error: object) -> None:
        return

    def add(self, index: int, text: str) -> None:
        self._pending[index] += text
        while (cut := self._cut(self._pending[index])) is not None:
            line, self._pending[index] = self._pending[index][:cut], self._pending[index][cut:]
            self._print(index, line)

    def end(self, index: int, outcome: str, good: bool) -> None:
        self._print(index, self._pending[index])
        self._pending[index] = ""
        self._print(index, f"({outcome})")

    @staticmethod
    def _cut(text: str) -> int | None:
        """Where the first whole line of `text` ends: a newline, or a word near the width."""
        newline = text.find("\n", 0, LINE_WIDTH + 1)
        if newline >= 0:
            return newline + 1
        if len(text) <= LINE_WIDTH:
            return None
        return text.rfind(" ", 0, LINE_WIDTH) + 1 or LINE_WIDTH

    def _print(self, index: int, line: str) -> None:
        if line.strip():
            text = Text(f"[{index + 1}] ", style="cyan").append(line.rstrip(), style="default")
            self._console.print(text, soft_wrap=True)


class Panels:
    """A panel a prompt, two abreast, as high as the terminal allows."""

    def __init__(self, console: Console, prompts: Sequence[str]) -> None:
        self._console = console
        self._prompts = prompts
        self._texts = [""] * len(prompts)
        self._outcomes: dict[int, tuple[str, bool]] = {}
        self._live = Live(
            console=console, refresh_per_second=REFRESH_A_SECOND, get_renderable=self._grid
        )

    def __enter__(self) -> object:
        return self._live.__enter__()

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def add(self, index: int, text: str) -> None:
        self._texts[index] += printable(text)

    def end(self, index: int, outcome: str, good: bool) -> None:
        self._outcomes[index] = (outcome, good)

    def _grid(self) -> Table:
        columns = COLUMNS if self._console.width >= COLUMNS * NARROWEST_PANEL else 1
        rows = -(-len(self._prompts) // columns)
        width = self._console.width // columns
        height = max(LOWEST_PANEL, (self._console.height - 2) // rows)
        grid = Table.grid()
        panels = [self._panel(i, width, height) for i in range(len(self._prompts))]
        for start in range(0, len(panels), columns):
            grid.add_row(*panels[start : start + columns])
        return grid

    def _panel(self, index: int, width: int, height: int) -> Panel:
        outcome, good = self._outcomes.get(index, ("", True))
        title = Text(f" {index + 1}  {self._prompts[index]} ", style="bold", overflow="ellipsis")
        title.truncate(width - 6, overflow="ellipsis")
        lines = Text(self._texts[index].strip()).wrap(self._console, width - 4)[-(height - 2) :]
        style = "cyan" if not outcome else "bright_black" if good else "red"
        return Panel(
            Text("\n").join(lines), title=title, title_align="left", width=width, height=height,
            subtitle=Text(f" {outcome} ", style="dim" if good else "red") if outcome else None,
            subtitle_align="right", border_style=style,
        )  # fmt: skip


def view_for(console: Console, prompts: Sequence[str]) -> View:
    return Panels(console, prompts) if console.is_terminal else Lines(console, prompts)


def median(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if not ordered:
        return None
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def mean_itl(completions: Sequence[Completion]) -> float | None:
    """Mean gap between tokens in seconds, every token counting alike."""
    tokens, seconds = 0, 0.0
    for c in completions:
        if c.itl_s is not None:
            later = len(c.token_ids) - c.first_tokens
            tokens, seconds = tokens + later, seconds + later * c.itl_s
    return seconds / tokens if tokens else None


def results_table(completions: Sequence[Completion], asked: int, elapsed_s: float) -> Table:
    """Requests, tokens, speed and latencies of the completed requests."""
    tokens = sum(len(c.token_ids) for c in completions)
    ttfts = [c.ttft_s for c in completions if c.ttft_s is not None]
    ttft = f"{seconds_text(median(ttfts))} p50, {seconds_text(max(ttfts, default=None))} max"
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("requests", f"{len(completions)} of {asked} completed"),
        ("tokens", f"{tokens:,} in {elapsed_s:.2f} s"),
        ("throughput", f"{tokens / elapsed_s:.1f} tokens/s" if elapsed_s else NOTHING),
        ("TTFT", ttft),
        ("ITL", f"{seconds_text(mean_itl(completions))} mean"),
    ):
        table.add_row(Text(f"  {name}", style="dim"), value)
    return table


def owners_table(
    status: Status, completions: Sequence[Completion], peak_kv_tokens: dict[int, int]
) -> Table:
    """What each node rooted and owned; KV is the highest that was seen."""
    table = Table(box=None, padding=(0, 0, 0, 2), header_style="dim")
    table.add_column("node")
    table.add_column("rooted")
    for column in ("owned", "KV peak", "of capacity"):
        table.add_column(column, justify="right")
    for node in status.nodes:
        peak = peak_kv_tokens.get(node.node, 0)
        owned = sum(1 for c in completions if c.finish and node.node in c.finish.owners)
        share = f"{peak / node.capacity_tokens:.1%}" if node.capacity_tokens else NOTHING
        table.add_row(
            str(node.node),
            blocks_text(node.blocks),
            str(owned), plural(peak, "token"), share,
        )  # fmt: skip
    return table
