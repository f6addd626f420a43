"""Service-level objectives: bounds a request must keep to be good.

    ntpot   normalized latency, arrival to last token over output tokens, ms (the paper's SLO)
    ttft    arrival to first token, ms
    tpot    mean time of a token after the first chunk, ms
    stall   longest pause between two chunks, ms
    e2el    arrival to last token, ms

A failed request is never good. A bound on what a request doesn't have (tpot of a single chunk) does
not apply to it: it is neither 0 nor a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tknp_loadgen.errors import InputError

KEYS = ("ntpot", "ttft", "tpot", "stall", "e2el")
DEFAULT = ("ntpot:100",)


@dataclass(frozen=True)
class Slo:
    """Upper bounds in milliseconds, all of which must hold."""

    bounds: Mapping[str, float]

    @staticmethod
    def parse(items: Sequence[str]) -> Slo:
        """From KEY:MS ...; raises InputError."""
        bounds: dict[str, float] = {}
        for item in items:
            key, _, text = item.partition(":")
            try:
                limit = float(text)
            except ValueError:
                limit = -1.0
            if key not in KEYS or not limit > 0:
                raise InputError("goodput", item, f"write KEY:MS, KEY one of {', '.join(KEYS)}")
            bounds[key] = limit
        return Slo(bounds)

    def good(self, values_ms: Mapping[str, float | None]) -> bool:
        """Whether a completed request with these values keeps every bound that applies to it."""
        for key, limit in self.bounds.items():
            value = values_ms[key]
            if value is not None and value > limit:
                return False
        return True

    def __str__(self) -> str:
        return " and ".join(f"{key} <= {limit:g} ms" for key, limit in self.bounds.items())


def request_values_ms(
    scheduled_s: float,
    first_s: float,
    last_s: float,
    tokens: int,
    first_tokens: int,
    max_gap_s: float | None,
) -> dict[str, float | None]:
    """A completed request's values by SLO key."""
    later = tokens - first_tokens
    return {
        "ntpot": (last_s - scheduled_s) / tokens * 1e3,
        "ttft": (first_s - scheduled_s) * 1e3,
        "tpot": (last_s - first_s) / later * 1e3 if later > 0 else None,
        "stall": None if max_gap_s is None else max_gap_s * 1e3,
        "e2el": (last_s - scheduled_s) * 1e3,
    }  # fmt: skip
