"""What a step is predicted to take: the simulation of a few steps, read in its middle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tknp.layout.rank import Rank
from tknp.planner.cost import Costs
from tknp.planner.hardware import Hardware
from tknp.planner.models import Model
from tknp.planner.simulate import simulate
from tknp.planner.spans import LANES, Span, busy_ratio, idle, window
from tknp.planner.step import Step

_STEPS = 6


@dataclass(frozen=True)
class Forecast:
    """`spans`: of rank 0 of each node. `start_s`, `stop_s`: one step of stream 0, well under way.

    `step_s`: between two tokens of a request, the mean over requests. `busy`: share of that step by
    node, and by lane or "idle".
    """

    spans: tuple[Span, ...]
    start_s: float
    stop_s: float
    step_s: float
    tokens_per_s: float
    busy: Mapping[int, Mapping[str, float]]


def forecast(model: Model, hardware: Hardware, step: Step) -> Forecast:
    """Simulate steps of every stream at once, which take turns as in the engine on CPUs."""
    costs = Costs(model, hardware, step.layout, step.tokens)
    streams = [{r: p for r, p in programs.items() if r.t == 0} for programs in step.programs]
    spans = simulate(streams, costs, steps=_STEPS, layout=step.layout)
    ends = [_ends(spans, stream) for stream in range(len(streams))]
    begin, end = max(passed[1] for passed in ends), min(passed[-1] for passed in ends)
    rows = [sum(group.rows for group in groups) for groups in step.groups]
    made = sum(
        count * (_progress(passed, end) - _progress(passed, begin))
        for count, passed in zip(rows, ends, strict=True)
    )
    tokens_per_s = made / (end - begin)
    start, stop = ends[0][2], ends[0][3]
    middle = window(spans, start, stop)
    busy = {
        node: _shares([s for s in middle if s.rank == Rank(node, 0)], stop - start)
        for node in range(step.layout.nodes)
    }
    return Forecast(
        tuple(spans), start, stop, step.batch / tokens_per_s, tokens_per_s, busy
    )  # fmt: skip


def _shares(spans: Sequence[Span], seconds: float) -> dict[str, float]:
    shares: dict[str, float] = {lane: busy_ratio(spans, lane, seconds) for lane in LANES}
    shares["idle"] = sum(stop - start for start, stop in idle(spans, 0.0, seconds)) / seconds
    return shares


def _ends(spans: Sequence[Span], stream: int) -> list[float]:
    """When `stream` began, and when each of its steps ended."""
    ends = [0.0] * (_STEPS + 1)
    for span in spans:
        if span.stream == stream:
            ends[span.step + 1] = max(ends[span.step + 1], span.end_s)
    return ends


def _progress(ends: Sequence[float], time: float) -> float:
    """Steps passed at `time`, fractions by linear interpolation."""
    done = min(bisect_right(ends, time), len(ends) - 1) - 1
    return done + (time - ends[done]) / (ends[done + 1] - ends[done])
