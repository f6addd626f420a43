"""Rates and quantiles of a pool from looks at it, pure.

    Look(time, Status, Scrape or None)  ->  History, the looks of the last minute  ->  Figures

With the coordinator's metrics, tokens are counted and quantiles come from the buckets between the
oldest look and the newest. Without them tokens a second are estimated: each step of a stream gives
a token to each of its rows. A pool that has started again is another one: its looks begin anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from tknp.v1.coordinator_pb2 import Status

KEPT_S = 60.0
TTFT, ITL = "tknp_time_to_first_token_seconds", "tknp_inter_token_latency_seconds"
GENERATED, PROMPTS = "tknp_generation_tokens_total", "tknp_prompt_tokens_total"


@dataclass(frozen=True)
class Scrape:
    """The coordinator's metrics: counters by name, observations up to each bound by histogram."""

    counters: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]


@dataclass(frozen=True)
class Look:
    """What a pool said at `at_s`. `error`: why its metrics, though asked for, did not come."""

    at_s: float
    status: Status
    scrape: Scrape | None = None
    error: str = ""


@dataclass(frozen=True)
class Figures:
    """Over the last `window_s` seconds; None where nothing tells, quantiles in seconds."""

    window_s: float = 0.0
    output_tokens_per_s: float | None = None
    estimated: bool = False
    prompt_tokens_per_s: float | None = None
    steps_per_s: float | None = None
    ttft_s: tuple[float, float] | None = None
    itl_s: tuple[float, float] | None = None


@dataclass
class History:
    """Looks of the last `KEPT_S` seconds, the oldest first, and one older."""

    looks: deque[Look] = field(default_factory=deque)

    def add(self, look: Look) -> None:
        """Keep `look`, the newest."""
        if self.looks and _begun_anew(self.looks[-1].status, look.status):
            self.looks.clear()
        self.looks.append(look)
        while len(self.looks) > 2 and self.looks[1].at_s <= look.at_s - KEPT_S:
            self.looks.popleft()

    def figures(self) -> Figures:
        """Quantiles of the whole history, rates of its newest two looks."""
        if len(self.looks) < 2:
            return Figures()
        first, before, last = self.looks[0], self.looks[-2], self.looks[-1]
        seconds = last.at_s - before.at_s
        if seconds <= 0:
            return Figures()
        tokens, estimated = output_tokens(before, last)
        return Figures(
            window_s=last.at_s - first.at_s,
            output_tokens_per_s=tokens / seconds,
            estimated=estimated,
            prompt_tokens_per_s=_rate(_counted(before, last, PROMPTS), seconds),
            steps_per_s=(last.status.steps - before.status.steps) / seconds,
            ttft_s=_pair(first, last, TTFT),
            itl_s=_pair(first, last, ITL),
        )

    def speeds(self) -> Iterator[float]:
        """Output tokens a second between each two looks, the oldest first."""
        for before, after in pairwise(self.looks):
            if after.at_s > before.at_s:
                yield output_tokens(before, after)[0] / (after.at_s - before.at_s)


def output_tokens(before: Look, after: Look) -> tuple[float, bool]:
    """Tokens given to streams between two looks, and whether that is an estimate."""
    counted = _counted(before, after, GENERATED)
    if counted is not None:
        return counted, False
    steps = {stream.stream: stream.steps for stream in before.status.streams}
    rows = (
        (stream.steps - steps.get(stream.stream, stream.steps)) * stream.running
        for stream in after.status.streams
    )
    return float(sum(rows)), True


def quantile(q: float, counts: Mapping[float, float]) -> float | None:
    """Quantile `q` of observations counted up to each bound, straight within a bucket.

    As Prometheus has it: what lies above the last finite bound counts as that bound. None without
    observations.
    """
    bounds = sorted(counts)
    total = counts[bounds[-1]] if bounds else 0.0
    if total <= 0:
        return None
    low, below = 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= q * total:
            if bound == float("inf"):
                return low
            within = counts[bound] - below
            share = (q * total - below) / within if within else 0.0
            return low + (bound - low) * share
        low, below = bound, counts[bound]
    return low


def _pair(first: Look, last: Look, name: str) -> tuple[float, float] | None:
    """p50 and p99 of what `name` observed between two looks."""
    if first.scrape is None or last.scrape is None:
        return None
    old, new = first.scrape.buckets.get(name, {}), last.scrape.buckets.get(name, {})
    counts = {bound: count - old.get(bound, 0.0) for bound, count in new.items()}
    median, tail = quantile(0.5, counts), quantile(0.99, counts)
    return (median, tail) if median is not None and tail is not None else None


def _counted(before: Look, after: Look, name: str) -> float | None:
    if before.scrape is None or after.scrape is None:
        return None
    values = before.scrape.counters.get(name), after.scrape.counters.get(name)
    return values[1] - values[0] if values[0] is not None and values[1] is not None else None


def _rate(amount: float | None, seconds: float) -> float | None:
    return None if amount is None else amount / seconds


def _begun_anew(before: Status, after: Status) -> bool:
    return (
        after.epoch != before.epoch
        or after.uptime_s < before.uptime_s
        or after.steps < before.steps
    )
