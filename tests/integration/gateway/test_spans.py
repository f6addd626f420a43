"""One trace from the client through gateway, coordinator and prefill to the owner."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from tknp.gateway import access
from tknp.local import InProcessPool
from tknp.rpc import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODY = {"model": "speaker", "prompt": "x", "temperature": 0, "max_tokens": 2}


async def test_every_hop_is_a_span_of_the_client_s_trace(
    open_speaker: Callable[..., Any],
    serving: Callable[..., Any],
    until: Callable[[Callable[[], bool]], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.trace.propagation import tracecontext

    kept, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))

    class Local:
        """The API, with a provider of this test's own."""

        SpanKind = trace.SpanKind
        set_span_in_context = staticmethod(trace.set_span_in_context)
        get_tracer = staticmethod(provider.get_tracer)

    made = tracing.OpenTelemetry(Local, tracecontext.TraceContextTextMapPropagator())
    for module in (tracing, access):
        monkeypatch.setattr(module, "tracer", lambda: made)
    pool = open_speaker(nodes=1)
    async with (
        InProcessPool(pool),
        serving(pool.config.coordinator) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=60) as http,
    ):
        answer = await http.post("/v1/completions", json=BODY, headers={"traceparent": PARENT})
        assert answer.status_code == 200

        def ours() -> dict[str, Any]:
            spans = kept.get_finished_spans()
            return {
                span.name: span
                for span in spans
                if f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
            }

        hops = [
            ("POST /v1/completions", None),
            ("tknp.v1.Inference/Generate", "POST /v1/completions"),
            ("tknp.v1.AttentionOwner/Reserve", "tknp.v1.Inference/Generate"),
            ("tknp.v1.Prefill/Run", "tknp.v1.Inference/Generate"),
            ("tknp.v1.AttentionOwner/Begin", "tknp.v1.Prefill/Run"),
            ("tknp.v1.AttentionOwner/Complete", "tknp.v1.Prefill/Run"),
        ]
        await until(lambda: {name for name, _ in hops} <= set(ours()))
        found = ours()
    for name, parent in hops:
        if parent is None:
            assert f"{found[name].parent.span_id:016x}" == PARENT.split("-")[2]
        else:
            assert found[name].parent.span_id == found[parent].context.span_id


async def test_without_opentelemetry_the_trace_goes_on_untouched(
    open_speaker: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []

    class Noting(tracing.PassingOn):
        """What a server without the library does, written down."""

        def span(self, name: str, traceparent: str) -> Any:
            seen.append((name, traceparent))
            return super().span(name, traceparent)

    from tknp.client import Client, request_for
    from tknp.v1.common_pb2 import Sampling

    monkeypatch.setattr(tracing, "tracer", Noting)
    pool = open_speaker(nodes=1)
    async with InProcessPool(pool), Client(pool.config.coordinator) as client:
        stream = client.generate(
            request_for("x", Sampling(max_tokens=2)), 60.0, (("traceparent", PARENT),)
        )
        assert [response async for response in stream][-1].HasField("finish")
    assert {"tknp.v1.Prefill/Run", "tknp.v1.AttentionOwner/Begin"} <= {name for name, _ in seen}
    assert {parent for _, parent in seen} == {PARENT}
