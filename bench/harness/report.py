"""Results as rows, and where they go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Target:
    """A bound on a row's `field`, "ours" or "ratio": at least `least` or at most `most`."""

    field: str
    least: float | None = None
    most: float | None = None

    def holds(self, value: float) -> bool:
        return (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )

    def __str__(self) -> str:
        bounds = ((">=", self.least), ("<=", self.most))
        parts = [f"{self.field} {sign} {bound:g}" for sign, bound in bounds if bound is not None]
        return ", ".join(parts)


@dataclass(frozen=True)
class Row:
    """One result. `peer` is None where there is nothing to compare with, or it was not found."""

    name: str
    ours: float
    unit: str
    peer: float | None = None
    target: Target | None = None

    @property
    def ratio(self) -> float | None:
        """Ours to the peer's."""
        return self.ours / self.peer if self.peer else None

    @property
    def ok(self) -> bool | None:
        """Whether the target is met; None without target or without the value it bounds."""
        if self.target is None:
            return None
        value = self.ours if self.target.field == "ours" else self.ratio
        return None if value is None else self.target.holds(value)

    def plain(self) -> dict[str, object]:
        """{name, ours, peer, ratio, unit, target, ok}, ready for JSON."""
        target = None if self.target is None else str(self.target)
        return {
            "name": self.name, "ours": self.ours, "peer": self.peer, "ratio": self.ratio,
            "unit": self.unit, "target": target, "ok": self.ok,
        }  # fmt: skip


def at_least(ratio: float) -> Target:
    return Target("ratio", least=ratio)


def show(title: str, rows: Sequence[Row], machine: dict[str, str], file: TextIO) -> None:
    """A table, with the machine it was measured on below it."""
    table = Table(title=title, title_justify="left", caption=" · ".join(machine.values()))
    for name in ("", "ours", "peer", "ratio", "unit", "target", ""):
        table.add_column(name, justify="left" if name in ("", "unit", "target") else "right")
    marks = {None: "", True: "[green]ok[/]", False: "[red]missed[/]"}
    for row in rows:
        table.add_row(
            row.name, _number(row.ours), _number(row.peer), _number(row.ratio), row.unit,
            str(row.target or ""), marks[row.ok],
        )  # fmt: skip
    Console(file=file, width=None if file.isatty() else 150).print(table)


def note(text: str) -> None:
    """Progress, apart from results."""
    print(text, file=sys.stderr, flush=True)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
