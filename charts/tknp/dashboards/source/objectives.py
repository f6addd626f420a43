"""What a pool promises, once: the dashboard and the burn rates of alerts/tknp.yaml follow from it.

    python charts/tknp/dashboards/source/objectives.py      writes the group tknp-slo of that file

An error budget is what may miss. Each window is given good events for free, 0.2 over the budget: no
traffic burns nothing, and one failure in a quiet night pages nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ALERTS = Path(__file__).parents[2] / "alerts" / "tknp.yaml"
TTFT, ITL = "tknp_time_to_first_token_seconds", "tknp_inter_token_latency_seconds"
INFERENCE = 'endpoint=~".*/completions|Generate|ModelInfer|ModelStreamInfer"'
BAD = 'status=~"5..|unavailable|internal|deadline_exceeded|unknown|data_loss"'
FAILED, ENDED = 'outcome="failed"', 'outcome=~"completed|failed"'
REFUSED = 'reason=~"resource_exhausted|unavailable"'
WINDOWS = ("5m", "30m", "1h", "6h")
_BEGIN, _END = "  # How many times as fast as allowed", "  # end of tknp-slo\n"


@dataclass(frozen=True)
class Objective:
    """`percent` of events keep it; `bound_s`: those that come within, of `histogram`."""

    name: str
    percent: float
    meaning: str
    histogram: str = ""
    bound_s: float = 0.0

    @property
    def budget(self) -> float:
        """Share of events that may miss."""
        return round(1 - self.percent / 100, 6)

    @property
    def free_events(self) -> float:
        """Good events that every window is given."""
        return 0.2 / self.budget


AVAILABILITY = Objective(
    "availability", 99.9, "requests end without failure, or refusal for want of room or a pool"
)
GATEWAY = Objective("gateway", 99.9, "answers of the gateway to inference are no server errors")
FIRST = Objective("ttft", 95, "first tokens come within 10 s", TTFT, 10.0)
LATER = Objective("itl", 99, "later tokens come within 100 ms", ITL, 0.1)
OBJECTIVES = (AVAILABILITY, GATEWAY, FIRST, LATER)


def _sum(series: str, window: str, *matchers: str) -> str:
    chosen = f"{{{','.join(matchers)}}}" if matchers else ""
    return f"sum by (namespace, pool) (increase({series}{chosen}[{window}]))"


def _requests(one: Objective, window: str) -> str:
    refused = _sum("tknp_refusals_total", window, REFUSED)
    return (f"({_sum('tknp_requests_total', window, FAILED)}\n"
            f"  + {refused})\n"
            f"/ ({_sum('tknp_requests_total', window, ENDED)}\n"
            f"  + {refused} + {one.free_events:g})")  # fmt: skip


def _answers(one: Objective, window: str) -> str:
    every = _sum("tknp_gateway_requests_total", window, INFERENCE)
    return (f"({_sum('tknp_gateway_requests_total', window, INFERENCE, BAD)}\n"
            f"  or 0 * {every})\n"
            f"/ ({every} + {one.free_events:g})")  # fmt: skip


def _late(one: Objective, window: str) -> str:
    every = _sum(f"{one.histogram}_count", window)
    good = _sum(f"{one.histogram}_bucket", window, f'le="{one.bound_s}"')
    return f"({every}\n  - {good})\n/ ({every} + {one.free_events:g})"


_EVENTS: dict[str, Callable[[Objective, str], str]] = {
    "availability": _requests, "gateway": _answers, "ttft": _late, "itl": _late,
}  # fmt: skip


def _rules() -> Iterator[str]:
    yield f"{_BEGIN} the error budget is spent; 1 spends it exactly.\n"
    for one in OBJECTIVES:
        yield f"  #   {one.name:<14}{one.percent:g} % of {one.meaning}\n"
    yield "  # Made by dashboards/source/objectives.py: change it there and run it.\n"
    yield "  - name: tknp-slo\n    interval: 30s\n    rules:\n"
    for window in WINDOWS:
        for one in OBJECTIVES:
            expression = f"{_EVENTS[one.name](one, window)}\n/ {one.budget:g}"
            yield f"      - record: tknp:slo_burn:{window}\n        labels: {{slo: {one.name}}}\n"
            yield "        expr: |-\n"
            yield "".join(f"          {line}\n" for line in expression.splitlines())
    yield _END


def updated(text: str) -> str:
    """The alerts' file with its group of burn rates made anew."""
    before, _, rest = text.partition(_BEGIN)
    return before + "".join(_rules()) + rest.partition(_END)[2]


if __name__ == "__main__":
    ALERTS.write_text(updated(ALERTS.read_text()))
