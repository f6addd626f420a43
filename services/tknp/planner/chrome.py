"""Spans in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A node is a process there; a rank has one thread a stream and lane, and one for waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tknp.planner.spans import LANES, Span

_WAITING = "waiting"
_THREADS = (*LANES, _WAITING)
_MICROSECONDS = 1e6


def trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The JSON object. Times count from the first span."""
    origin = min((span.start_s for span in spans), default=0.0)
    streams = 1 + max((span.stream for span in spans), default=0)
    events: list[dict[str, Any]] = []
    named: set[tuple[int, int]] = set()
    for span in sorted(spans, key=lambda s: (s.rank, s.start_s)):
        for thread, start, stop in (
            (_WAITING, span.start_s, span.start_s + span.waited_s),
            (span.lane, *span.busy_s),
        ):
            if stop <= start and (thread == _WAITING or span.waited_s > 0):
                continue
            tid = (span.rank.t * streams + span.stream) * len(_THREADS) + _THREADS.index(thread)
            if (span.rank.node, tid) not in named:
                named.add((span.rank.node, tid))
                events += _names(span, tid, thread, streams)
            events.append(
                {
                    "ph": "X", "pid": span.rank.node, "tid": tid, "cat": thread,
                    "name": f"{span.kind} {span.layer}" if span.layer >= 0 else str(span.kind),
                    "ts": (start - origin) * _MICROSECONDS, "dur": (stop - start) * _MICROSECONDS,
                    "args": {"layer": span.layer, "stream": span.stream, "step": span.step},
                }
            )  # fmt: skip
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _names(span: Span, tid: int, thread: str, streams: int) -> list[dict[str, Any]]:
    place = {"ph": "M", "pid": span.rank.node, "tid": tid}
    name = f"t {span.rank.t} {thread}" + (f", stream {span.stream}" if streams > 1 else "")
    return [
        {**place, "name": "process_name", "args": {"name": f"node {span.rank.node}"}},
        {**place, "name": "thread_name", "args": {"name": name}},
        {**place, "name": "thread_sort_index", "args": {"sort_index": tid}},
    ]
