"""Tracing on one rank: starts the engine's recorder and sends what it has recorded."""

from __future__ import annotations

import asyncio
from typing import Any

from tknp.engine.recorder import Recorder, Recording
from tknp.errors import InvalidValue
from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.v1 import tracing_pb2, tracing_pb2_grpc
from tknp.v1.tracing_pb2 import TraceRequest, TraceResponse

SERVICE = tracing_pb2.DESCRIPTOR.services_by_name["Tracing"].full_name
_LONGEST_S = 600.0


class TracingService(tracing_pb2_grpc.TracingServicer):
    """Of the rank that `recorder` belongs to."""

    def __init__(self, rank: Rank, recorder: Recorder) -> None:
        self._rank = rank
        self._recorder = recorder

    async def Trace(self, request: TraceRequest, context: Any) -> TraceResponse:
        if not 0 < request.timeout_s <= _LONGEST_S:
            raise InvalidValue("timeout_s", request.timeout_s, f"must be above 0, to {_LONGEST_S}")
        recording = self._recorder.start(request.steps)
        try:
            await asyncio.wait([asyncio.wrap_future(recording.done)], timeout=request.timeout_s)
        finally:
            self._recorder.stop(recording)
        return self._response(recording)

    def _response(self, recording: Recording) -> TraceResponse:
        number = {kind: i for i, kind in enumerate(Kind)}
        operations = tuple(recording.operations)
        return TraceResponse(
            node=self._rank.node,
            tp_rank=self._rank.t,
            origin_unix_s=recording.origin_unix_s,
            kinds=[kind.value for kind in Kind],
            kind=[number[op.kind] for op in operations],
            layer=[op.layer for op in operations],
            stream=[op.stream for op in operations],
            step=[op.step for op in operations],
            start_s=[op.start_s for op in operations],
            seconds=[op.seconds for op in operations],
            waited_s=[op.waited_s for op in operations],
        )
