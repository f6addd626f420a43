"""W3C trace context through the whole system; spans where OpenTelemetry is installed.

    gateway -traceparent-> coordinator Generate -> owner Reserve, Release
                                                -> prefill Run -> owner Begin, Complete

A call that brings a `traceparent` is a span of its server, and what that asks of others brings it
along: `TracedCalls` serves, `CarryTrace` asks. Calls without one, such as the steps, are no spans
and cost nothing.

Without it a client's `traceparent` still reaches the pool as it came, so that a trace that was
begun elsewhere is not torn here. With it spans go wherever a tracer provider was set up to send
them, as `opentelemetry-instrument` does by the standard OTEL_* environment variables.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from inspect import iscoroutinefunction
from typing import Any, Protocol

import grpc
from grpc import aio

_KEY = "traceparent"
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
        self._tracer = trace.get_tracer("tknp")

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


TRACE: ContextVar[Trace] = ContextVar("tknp_trace", default=Trace())  # noqa: B039 - frozen
"""What the call that is being served belongs to; tasks begun under it inherit it."""


class TracedCalls(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Serves a call that brings a traceparent inside a span, with TRACE set."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        shown = [v for k, v in handler_call_details.invocation_metadata or () if k == _KEY]
        parent = trace_of(str(shown[0])).parent if len(shown) == 1 else ""
        if handler is None or not parent or handler.request_streaming:
            return handler  # type: ignore[no-any-return]
        if iscoroutinefunction(handler.unary_stream):  # health's Watch, which never ends
            return handler  # type: ignore[no-any-return]
        name = handler_call_details.method.removeprefix("/")

        async def unary(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            with tracer().span(name, parent) as trace:
                TRACE.set(trace)
                return await handler.unary_unary(request, context)

        async def stream(
            request: Any, context: aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            with tracer().span(name, parent) as trace:
                TRACE.set(trace)
                async for response in handler.unary_stream(request, context):
                    yield response

        codec = (handler.request_deserializer, handler.response_serializer)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(stream, *codec)
        return grpc.unary_unary_rpc_method_handler(unary, *codec)


class CarryTrace(aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    """Shows TRACE on calls that don't stream."""

    async def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: Any, request: Any
    ) -> Any:
        carried = TRACE.get().metadata
        if carried:
            metadata = aio.Metadata(*(details.metadata or ()), *carried)
            details = details._replace(metadata=metadata)
        return await continuation(details, request)
