"""Everything that one run depends on, checked once."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tknp_loadgen.errors import InputError
from tknp_loadgen.measure.slo import Slo
from tknp_loadgen.run.plan import Load
from tknp_loadgen.target.factory import TargetSettings
from tknp_loadgen.trace.format import Trace

REQUESTS_A_CORE = 1000  # a second; above it, or
TOKENS_A_CORE = 10_000  # above this, another process is started


@dataclass(frozen=True)
class RunSettings:
    """`goodput`: KEY:MS bounds, () for the paper's; `slo_target`: share that must keep them.

    `processes` 0: as many as the trace's rate needs. `start_at`: Unix time of release, so that
    several machines begin together. `max_lag_ms` replaces the limit beyond which a run is invalid.
    """

    target: TargetSettings
    output: Path
    load: Load = field(default_factory=Load)
    goodput: tuple[str, ...] = ()
    slo_target: float = 0.9
    processes: int = 1
    max_error_rate: float | None = None
    until_saturated: bool = False
    metrics_urls: tuple[str, ...] = ()
    metrics_interval_s: float = 1.0
    start_at: float | None = None
    max_lag_ms: float | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        Slo.parse(self.goodput)
        checks = {
            "slo_target": 0 < self.slo_target <= 1,
            "processes": self.processes >= 0,
            "max_error_rate": self.max_error_rate is None or 0 <= self.max_error_rate <= 1,
            "metrics_interval_s": self.metrics_interval_s > 0,
            "max_lag_ms": self.max_lag_ms is None or self.max_lag_ms > 0,
        }
        for name, good in checks.items():
            if not good:
                raise InputError(name, getattr(self, name), "out of range")
        if self.load.max_concurrency is not None and self.processes != 1:
            raise InputError("processes", self.processes, "--max-concurrency needs one process")

    def workers(self, trace: Trace) -> int:
        """Worker processes for this trace."""
        if self.processes:
            return self.processes
        share, span_s = self.load.slice[1], max(trace.span_s, 1.0)
        needed = max(
            len(trace) / share / span_s / REQUESTS_A_CORE,
            float(trace.output_tokens.sum()) / share / span_s / TOKENS_A_CORE,
        )
        return max(1, min(-int(-needed // 1), len(os.sched_getaffinity(0)) - 1))

    def config(self, trace: Trace) -> dict[str, Any]:
        """What config.yaml says; nothing secret is in it, only where secrets are read from."""
        return {
            "name": self.name, "target": self.target.url, "model": self.target.model,
            "trace_sha256": trace.sha256, "goodput": list(self.goodput),
            "slo_target": self.slo_target, "max_lag_ms": self.max_lag_ms,
            "max_error_rate": self.max_error_rate, "until_saturated": self.until_saturated,
            **{key: list(value) if isinstance(value, tuple) else value
               for key, value in asdict(self.load).items()},
        }  # fmt: skip
