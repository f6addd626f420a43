"""What a worker is told: everything that a run depends on, as plain data that travels as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tknp_loadgen.errors import InputError
from tknp_loadgen.exact import Draws
from tknp_loadgen.target.factory import TargetSettings
from tknp_loadgen.trace.format import Trace

CANCEL_STREAM = 20


@dataclass(frozen=True)
class Load:
    """How a trace is sent.

    `request_timeout_s` counts from scheduled arrival; None waits for ever. `max_concurrency` holds
    requests back in the client, and their waiting counts as the server's. A share `cancel_rate` of
    requests, chosen by the trace's seed, is cancelled `cancel_after_s` after release.
    `slice` (k, n) sends rows k, k+n, ... only.
    """

    request_timeout_s: float | None = None
    max_concurrency: int | None = None
    cancel_rate: float = 0.0
    cancel_after_s: float = 1.0
    num_warmups: int = 1
    connections: int | None = None
    slice: tuple[int, int] = (0, 1)
    text_file: str | None = None
    any_length: bool = False

    def __post_init__(self) -> None:
        part, parts = self.slice
        checks = {
            "request_timeout": self.request_timeout_s is None or self.request_timeout_s > 0,
            "max_concurrency": self.max_concurrency is None or self.max_concurrency > 0,
            "cancel_rate": 0 <= self.cancel_rate <= 1,
            "cancel_after_s": self.cancel_after_s >= 0,
            "num_warmups": self.num_warmups >= 0,
            "connections": self.connections is None or self.connections > 0,
            "slice": 0 <= part < parts,
        }
        for name, good in checks.items():
            if not good:
                raise InputError(name, getattr(self, name, self.request_timeout_s), "out of range")

    def rows(self, trace: Trace, part: int = 0, parts: int = 1) -> list[int]:
        """Rows that one worker of a slice sends; a closed loop's users stay whole."""
        first, step = self.slice[0] + self.slice[1] * part, self.slice[1] * parts
        if trace.users:
            return [r for r in range(len(trace)) if trace.extra(r)["user"] % step == first]
        return list(range(first, len(trace), step))

    def cancelled(self, trace: Trace) -> frozenset[int]:
        if not self.cancel_rate:
            return frozenset()
        drawn = Draws(trace.seed, CANCEL_STREAM).unit(len(trace))
        return frozenset(np.flatnonzero(drawn < self.cancel_rate).tolist())

    def pool_size(self, trace: Trace, rows: Sequence[int]) -> int:
        """Connections to open: as many as arrive within any 100 ms, 32 at least."""
        if self.connections is not None:
            return self.connections
        if trace.users:
            return min(trace.users, len(rows)) or 1
        times = trace.arrival_us[np.array(rows, np.int64)]
        within = np.searchsorted(times, times + 100_000, side="right") - np.arange(len(times))
        return max(32, int(within.max(initial=1)))


@dataclass(frozen=True)
class WorkerPlan:
    """One worker of a run."""

    worker: int
    workers: int
    directory: str
    target: TargetSettings
    load: Load
    slo: tuple[str, ...] = ()

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def loads(text: str) -> WorkerPlan:
        values: dict[str, Any] = json.loads(text)
        load = {**values["load"], "slice": tuple(values["load"]["slice"])}
        return WorkerPlan(
            values["worker"], values["workers"], values["directory"],
            TargetSettings(**values["target"]), Load(**load), tuple(values["slo"]),
        )  # fmt: skip
