"""TKNP's gRPC API: Inference.Generate. Messages are stamped before they are parsed."""

from __future__ import annotations

import ssl

from tknp.v1.common_pb2 import FinishReason, Sampling
from tknp.v1.inference_pb2 import GenerateRequest, GenerateResponse
from tknp_loadgen.target.base import Call, Clock, Ending, Sink
from tknp_loadgen.target.grpc_calls import PREFIX, Channel
from tknp_loadgen.trace.prompts import Prompt

METHOD = "/tknp.v1.Inference/Generate"


class TknpGrpc:
    """A TKNP pool at `address` (HOST:PORT). `tls`: None for none."""

    def __init__(
        self, address: str, clock: Clock, tls: ssl.SSLContext | None = None,
        token: str | None = None, ignore_eos: bool = True,
    ) -> None:  # fmt: skip
        self._channel = Channel(address, METHOD, clock, tls, token)
        self._ignore_eos = ignore_eos

    @property
    def late_connections(self) -> int:
        return self._channel.late

    async def open(self, connections: int) -> None:
        await self._channel.open(connections)

    def encode(self, prompt: Prompt, output_tokens: int) -> bytes:
        sampling = Sampling(max_tokens=output_tokens, ignore_eos=self._ignore_eos)
        request = GenerateRequest(sampling=sampling)
        if prompt.ids is not None:
            request.token_ids = prompt.ids.tobytes()
        else:
            request.text = prompt.text or ""
        message = request.SerializeToString()
        return PREFIX.pack(0, len(message)) + message

    def begin(self, payload: bytes, sink: Sink) -> Call:
        return self._channel.begin(payload, _Answer(sink))

    async def close(self) -> None:
        await self._channel.close()


class _Answer:
    """What the messages of one stream say."""

    __slots__ = ("_counted", "_ending", "_sink")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._counted = 0
        self._ending: Ending | None = None

    def released(self) -> None:
        self._sink.released()

    def retried(self) -> None:
        self._sink.retried()

    def message(self, raw: bytes, at_ns: int) -> None:
        message = GenerateResponse.FromString(raw)
        count = len(message.token_ids) // 4
        if count:
            self._counted += count
            self._sink.tokens(count, at_ns)
        if message.text:
            self._sink.text(message.text)
        if message.HasField("finish"):
            self._ending = _ending(message, self._counted)

    def closed(self, reason: str) -> None:
        if reason:
            self._sink.failed(reason)
        elif self._ending is None:
            self._sink.failed("the stream ended without a finish reason")
        else:
            self._sink.ended(self._ending)


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
