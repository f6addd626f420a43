"""W3C trace context, from the client to the pool; spans where OpenTelemetry is installed.

Without it a client's `traceparent` still reaches the pool as it came, so that a trace that was
begun elsewhere is not torn here. With it every request is a span under the client's, exported as
whoever set up a tracer provider has it, by the standard OTEL_* environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

_PARENT = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class Trace:
    """`parent`: the traceparent that the next hop gets; empty: no trace."""

    parent: str = ""

    @property
    def trace_id(self) -> str:
        return self.parent.split("-")[1] if self.parent else ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """For a gRPC call."""
        return (("traceparent", self.parent),) if self.parent else ()


def trace_of(traceparent: str) -> Trace:
    """The trace that a header names; a malformed one names none."""
    found = _PARENT.fullmatch(traceparent)
    return Trace(traceparent if found and set(found.group(1)) != {"0"} else "")


class Tracer(Protocol):
    """Makes a span of everything that happens inside a context."""

    def span(self, name: str, traceparent: str) -> Any: ...


class PassingOn:
    """Makes no spans."""

    @contextmanager
    def span(self, name: str, traceparent: str) -> Iterator[Trace]:
        yield trace_of(traceparent)


class OpenTelemetry:
    """Spans of the global tracer provider."""

    def __init__(self, trace: Any, propagator: Any) -> None:
        self._trace = trace
        self._propagator = propagator
        self._tracer = trace.get_tracer("tknp.gateway")

    @contextmanager
    def span(self, name: str, traceparent: str) -> Iterator[Trace]:
        context = self._propagator.extract({"traceparent": traceparent})
        with self._tracer.start_as_current_span(
            name, context=context, kind=self._trace.SpanKind.SERVER
        ) as span:
            carried: dict[str, str] = {}
            self._propagator.inject(carried, context=self._trace.set_span_in_context(span, context))
            yield trace_of(carried.get("traceparent", ""))


@cache
def tracer() -> Tracer:
    """OpenTelemetry's, if it is installed."""
    try:
        from opentelemetry import trace
        from opentelemetry.trace.propagation import tracecontext
    except ImportError:
        return PassingOn()
    return OpenTelemetry(trace, tracecontext.TraceContextTextMapPropagator())
