"""Trace context on its way through, and what logs say of a request."""

from __future__ import annotations

import json
import logging

import pytest

from tknp.gateway.access import REQUEST, RequestContext
from tknp.gateway.logs import JsonFormatter
from tknp.rpc.tracing import PassingOn, trace_of

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_passed_on_as_it_came() -> None:
    with PassingOn().span("anything", PARENT) as trace:
        assert trace.metadata == (("traceparent", PARENT),)
        assert trace.trace_id == PARENT.split("-")[1]


@pytest.mark.parametrize(
    "header", ["", "nonsense", PARENT.upper(), f"00-{'0' * 32}-b7ad6b7169203331-01", PARENT + "-x"]
)
def test_a_malformed_one_is_none(header: str) -> None:
    assert trace_of(header).metadata == ()


def test_opentelemetry_makes_a_child_of_it() -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.trace.propagation import tracecontext

    from tknp.rpc.tracing import OpenTelemetry

    class Local:
        """The API, with a provider of this test's own."""

        SpanKind = trace.SpanKind
        set_span_in_context = staticmethod(trace.set_span_in_context)
        get_tracer = staticmethod(sdk.TracerProvider().get_tracer)

    tracer = OpenTelemetry(Local, tracecontext.TraceContextTextMapPropagator())
    with tracer.span("POST /v1/completions", PARENT) as child:
        assert child.trace_id == PARENT.split("-")[1]
        assert child.parent != PARENT


def test_log_lines_name_their_request() -> None:
    record = logging.makeLogRecord(
        {
            "name": "tknp.gateway",
            "levelname": "INFO",
            "msg": "%d tokens",
            "args": (3,),
            "route": "/",
        }
    )
    token = REQUEST.set(RequestContext("abc", trace_of(PARENT)))
    try:
        line = json.loads(JsonFormatter().format(record))
    finally:
        REQUEST.reset(token)
    assert (line["message"], line["request_id"], line["route"]) == ("3 tokens", "abc", "/")
    assert line["trace_id"] == PARENT.split("-")[1]
    assert "request_id" not in json.loads(JsonFormatter().format(record))
