"""TKNP's gRPC API: Inference.Generate.

Messages travel undecoded through gRPC and are stamped before they are parsed. Several channels
share the load, all connected before release; each would do for thousands of streams, but an
intermediary may allow a hundred a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from tknp.v1.common_pb2 import FinishReason, Sampling
from tknp.v1.inference_pb2 import GenerateRequest, GenerateResponse
from tknp_loadgen.errors import TargetError
from tknp_loadgen.target.base import Clock, Ending, Failure, Sink
from tknp_loadgen.trace.prompts import Prompt

METHOD = "/tknp.v1.Inference/Generate"
CHANNELS = 4
_END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the stubs
OPEN_TIMEOUT_S = 30.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # else channels to one address share a connection
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.http2.max_pings_without_data", 0),
)


class TknpGrpc:
    """A TKNP pool at `address` (HOST:PORT). `tls_ca`: PEM certificates to trust; None: no TLS."""

    def __init__(
        self, address: str, clock: Clock, tls_ca: bytes | None = None, token: str | None = None,
        ignore_eos: bool = True,
    ) -> None:  # fmt: skip
        self._address = address
        self._clock = clock
        self._tls = None if tls_ca is None else grpc.ssl_channel_credentials(tls_ca)
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        self._ignore_eos = ignore_eos
        self._channels: list[grpc.aio.Channel] = []
        self._methods: list[Callable[..., Any]] = []
        self._turn = 0
        self.late_connections = 0

    async def open(self, connections: int) -> None:
        for number in range(max(1, min(CHANNELS, connections))):
            options = (*_OPTIONS, ("tknp.load.channel", number))
            channel = (
                grpc.aio.insecure_channel(self._address, options)
                if self._tls is None
                else grpc.aio.secure_channel(self._address, self._tls, options)
            )
            self._channels.append(channel)
            self._methods.append(channel.unary_stream(METHOD, None, None))
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await asyncio.gather(*(channel.channel_ready() for channel in self._channels))
        except TimeoutError as error:
            raise TargetError(f"no gRPC server answers at {self._address}") from error

    def encode(self, prompt: Prompt, output_tokens: int) -> bytes:
        sampling = Sampling(max_tokens=output_tokens, ignore_eos=self._ignore_eos)
        request = GenerateRequest(sampling=sampling)
        if prompt.ids is not None:
            request.token_ids = prompt.ids.tobytes()
        else:
            request.text = prompt.text or ""
        return request.SerializeToString()

    async def send(self, payload: bytes, sink: Sink) -> Ending:
        self._turn += 1
        call = self._methods[self._turn % len(self._methods)](payload, metadata=self._metadata)
        try:
            # grpc.aio starts the call in a task of its own, which runs before this goes on.
            await asyncio.sleep(0)
            sink.released()
            return await self._receive(call, sink)
        except grpc.aio.AioRpcError as error:
            words = " ".join((error.details() or "").split())
            raise Failure(f"{error.code().name}: {words or 'no reason given'}") from None
        finally:
            call.cancel()

    async def _receive(self, call: Any, sink: Sink) -> Ending:
        ending: Ending | None = None
        counted = 0
        while True:
            raw = await call.read()
            at_ns = self._clock()
            if raw is _END:
                break
            message = GenerateResponse.FromString(raw)
            count = len(message.token_ids) // 4
            if count:
                counted += count
                sink.tokens(count, at_ns)
            if message.text:
                sink.text(message.text)
            if message.HasField("finish"):
                ending = _ending(message, counted)
        if ending is None:
            raise Failure("the stream ended without a finish reason")
        return ending

    async def close(self) -> None:
        await asyncio.gather(*(channel.close(None) for channel in self._channels))


def _ending(message: GenerateResponse, counted: int) -> Ending:
    finish = message.finish
    timings = finish.timings if finish.HasField("timings") else None
    return Ending(
        finish=FinishReason.Name(finish.reason).removeprefix("FINISH_REASON_").lower(),
        completion_tokens=finish.completion_tokens or counted,
        prompt_tokens=finish.prompt_tokens or None,
        queue_s=timings.queue_s if timings else None,
        prefill_s=timings.prefill_s if timings else None,
        server_ttft_s=timings.ttft_s if timings else None,
        owner=finish.owners[0] if finish.owners else None,
    )
