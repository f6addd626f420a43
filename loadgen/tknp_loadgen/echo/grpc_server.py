"""The echo server's TKNP side: Inference.Generate."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from tknp.v1 import common_pb2
from tknp.v1.inference_pb2 import Accepted, Finish, GenerateRequest, GenerateResponse, Timings
from tknp_loadgen.echo.http import Seen
from tknp_loadgen.echo.script import Plan, RealTime, Received, Script, Time

_REASONS = {
    "length": common_pb2.FINISH_REASON_LENGTH,
    "stop": common_pb2.FINISH_REASON_STOP,
}
# gRPC would answer CANCELLED by itself beyond 1,000 requests that Python has not looked at yet, or
# to those that it has not looked at for 30 s.
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.server.max_pending_requests", 1_000_000),
    ("grpc.server.max_pending_requests_hard_limit", 1_000_000),
    ("grpc.server_max_unrequested_time_in_server", 3600),
)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcEcho(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """A server on a loopback port."""

    def __init__(self, plan: Plan, time: Time | None = None) -> None:
        self.plan = plan
        self.time = time or RealTime()
        self.seen = Seen()
        self._server: grpc.aio.Server | None = None

    async def start(self, port: int = 0) -> int:
        self._server = grpc.aio.server(handlers=(self,), options=_OPTIONS)
        bound = self._server.add_insecure_port(f"127.0.0.1:{port}")
        await self._server.start()
        return bound

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method != "/tknp.v1.Inference/Generate":
            return None
        return grpc.unary_stream_rpc_method_handler(self._generate)

    async def _generate(
        self, raw: bytes, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        seen = self.seen
        seen.received_ns.append(time.monotonic_ns())
        request = GenerateRequest.FromString(raw)
        received = Received(
            seen.requests, request.sampling.max_tokens, len(request.token_ids) // 4 or 7
        )
        seen.requests += 1
        seen.open += 1
        seen.most_open = max(seen.most_open, seen.open)
        try:
            async for message in self._run(received, self.plan(received), context):
                yield message
        except asyncio.CancelledError:
            seen.cancelled += 1
            raise
        finally:
            seen.open -= 1

    async def _run(
        self, received: Received, script: Script, context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        await self.time.pause(script.headers_pause_s)
        if script.refusal is not None:
            await context.abort(_CODES[script.refusal[0]], script.refusal[1])
        accepted = Accepted(request_id=str(received.number), prompt_tokens=received.prompt_tokens)
        yield GenerateResponse(accepted=accepted).SerializeToString()
        await self.time.written()
        for step in script.steps:
            await self.time.pause(step.pause_s)
            yield _message(step.tokens)
            await self.time.written()
        await self.time.pause(script.end_pause_s)
        if script.error is not None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, script.error)
        if not script.cut:
            told = script.tokens if script.told_tokens is None else script.told_tokens
            yield GenerateResponse(
                finish=Finish(
                    reason=_REASONS[script.finish], prompt_tokens=received.prompt_tokens,
                    completion_tokens=told, timings=Timings(queue_s=script.headers_pause_s),
                )
            ).SerializeToString()  # fmt: skip


_MESSAGES: dict[int, bytes] = {}


def _message(tokens: int) -> bytes:
    """A chunk of so many tokens, serialized once."""
    if tokens not in _MESSAGES:
        ids = struct.pack(f"<{tokens}I", *range(tokens))
        _MESSAGES[tokens] = GenerateResponse(
            token_ids=ids, text=" tok" * tokens
        ).SerializeToString()
    return _MESSAGES[tokens]
