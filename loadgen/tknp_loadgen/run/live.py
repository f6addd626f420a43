"""What a run shows while it goes on."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

from tknp_loadgen.run.watch import Totals


class View(Protocol):
    """Told of progress a few times a second."""

    def show(self, totals: Totals, elapsed_s: float) -> None: ...


class Silent:
    """Shows nothing."""

    def show(self, totals: Totals, elapsed_s: float) -> None: ...


class LiveView:
    """A table on standard error that is redrawn in place."""

    def __init__(self, title: str, rows: int) -> None:
        self._title, self._rows = title, rows
        self._live = Live(console=Console(file=sys.stderr), refresh_per_second=4, transient=True)
        self._before = (0.0, 0, 0)
        self._rates = (0.0, 0.0)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self._live.__exit__(kind, error, traceback)

    def show(self, totals: Totals, elapsed_s: float) -> None:
        then_s, released, tokens = self._before
        if elapsed_s - then_s >= 1.0:
            width = elapsed_s - then_s
            self._rates = (totals.released - released) / width, (totals.tokens - tokens) / width
            self._before = elapsed_s, totals.released, totals.tokens
        self._live.update(self._table(totals, elapsed_s))

    def _table(self, totals: Totals, elapsed_s: float) -> Table:
        table = Table(title=self._title, title_justify="left", show_edge=False)
        values = {
            "time": f"{max(0.0, elapsed_s):.0f} s",
            "sent": f"{totals.released}/{self._rows}",
            "rate": f"{self._rates[0]:.2f}/s",
            "in flight": str(totals.open),
            "tokens": f"{self._rates[1]:.0f}/s",
            "TTFT p50": _ms(totals.medians.get("ttft_ms")),
            "ITL p50": _ms(totals.medians.get("tpot_ms")),
            "SLO": f"{totals.good / totals.ended:.0%}" if totals.ended else "-",
            "lag p50": _ms(totals.medians.get("lag_ms")),
            "errors": f"[red]{totals.failed}[/]" if totals.failed else "0",
        }
        for name in values:
            table.add_column(name, justify="right")
        table.add_row(*values.values())
        return table


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"
