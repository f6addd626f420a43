"""The public service on the coordinator's port.

    Generate   prompt -> ids (off the event loop) -> checked -> queued -> tokens as they come
    GetModel   what a client has to know of the model
    Tokenize, Detokenize   ids of a text or a chat, and back

Tokens that are ready together go out in one message, or as many together as the client asks for
(`stream_interval`). A client that goes away ends its request, and so does a deadline: the call's
own, or `timeout_s` if that is sooner. A client that brings what an earlier attempt generated gets
what comes after.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tknp.coordinator.driver import Driver
from tknp.coordinator.request import NO_DEADLINE_S, Event, Request
from tknp.coordinator.serving import Serving
from tknp.errors import InvalidValue, TknpError
from tknp.kv.holding import Key
from tknp.model.stops import StreamText, check_stops
from tknp.model.tokenizer import Tokenizer
from tknp.rpc.convert import sampling_from
from tknp.rpc.ids import pack_ids, unpack_ids
from tknp.sampling.grammar import Grammars
from tknp.sampling.params import validate
from tknp.v1 import inference_pb2 as pb
from tknp.v1 import inference_pb2_grpc
from tknp.v1.common_pb2 import FinishReason, Logprobs, Token

_MAX_REQUEST_ID = 128
_MAX_INTERVAL = 1024  # more would make messages with log probabilities large


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Names on the wire are the client's; inside, every request has an id of its own."""

    def __init__(self, driver: Driver, tokenizer: Tokenizer, model_name: str) -> None:
        self._driver = driver
        self._tokenizer = tokenizer
        self._name = model_name
        model = driver.pool.checkpoint.config
        self._grammars = Grammars(lambda: tokenizer, model.vocab_size, model.eos_ids)
        self._vocab_size = driver.pool.checkpoint.config.vocab_size

    async def Generate(
        self, message: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        arrived_s = self._driver.clock()
        try:
            serving = self._driver.open()
            request = await self._accept(serving, message, arrived_s, context.time_remaining())
        except TknpError as error:
            self._driver.counts.refused += 1
            self._driver.metrics.refused(error)
            raise
        name = message.request_id or request.key.request_id
        accepted = pb.Accepted(request_id=name, prompt_tokens=len(request.prompt))
        try:
            yield pb.GenerateResponse(accepted=accepted)
            text = StreamText(self._tokenizer.stream(), message.stop, request.params.min_tokens)
            for token_id in request.generated[: request.given]:
                text.push([token_id])  # as they came: what is out already depends on it
            response = await self._response(request, text, least=1)
            while not response.HasField("finish"):
                yield response
                response = await self._response(request, text, message.stream_interval)
            if text.stopped is not None:
                serving.complete(request)
            yield response
        finally:
            serving.cancel(request)

    async def _response(
        self, request: Request, text: StreamText, least: int
    ) -> pb.GenerateResponse:
        """The next message: `least` tokens or more, fewer only where the request ends."""
        sent: list[Token] = []
        pieces: list[str] = []
        finish = None
        while finish is None and text.stopped is None and (not sent or len(sent) < least):
            tokens, finish = await _next(request)
            before = text.tokens
            pieces.append(text.push([token.token_id for token in tokens]))
            sent += tokens[: text.tokens - before]
        response = pb.GenerateResponse(token_ids=pack_ids([token.token_id for token in sent]))
        if finish is not None or text.stopped is not None:
            pieces.append(text.flush())
            if finish is None or text.stopped is not None:
                finish = FinishReason.FINISH_REASON_STOP
            response.finish.CopyFrom(self._finish(request, finish, text))
        response.text = "".join(pieces)
        if request.params.logprobs is not None:
            response.logprobs.extend(map(self._with_text, sent))
        return response

    async def GetModel(self, message: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        model = self._driver.pool.checkpoint.config
        longest = self._driver.open().scheduler.limits.longest
        return pb.GetModelResponse(
            name=self._name,
            family=model.family,
            dtype=self._driver.pool.config.dtype,
            vocab_size=model.vocab_size,
            max_model_len=longest,
            eos_token_ids=model.eos_ids,
            has_chat_template=self._tokenizer.has_chat_template,
        )

    async def Detokenize(
        self, message: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        ids = self._ids("token_ids", message.token_ids)
        return pb.DetokenizeResponse(text=await asyncio.to_thread(self._tokenizer.decode, ids))

    async def Tokenize(self, message: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        ids = await self._encode(message)
        return pb.TokenizeResponse(token_ids=pack_ids(ids))

    async def _accept(
        self,
        serving: Serving,
        message: pb.GenerateRequest,
        arrived_s: float,
        call_s: float | None,
    ) -> Request:
        """Check and queue. `call_s`: what the call's own deadline leaves, if it has one."""
        if len(message.request_id) > _MAX_REQUEST_ID:
            shown = message.request_id[:16] + "..."
            raise InvalidValue("request_id", shown, f"at most {_MAX_REQUEST_ID} characters")
        if message.stream_interval > _MAX_INTERVAL:
            remedy = f"at most {_MAX_INTERVAL} tokens"
            raise InvalidValue("stream_interval", message.stream_interval, remedy)
        timeout_s = message.timeout_s
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise InvalidValue("timeout_s", timeout_s, "a number of seconds, 0 for no limit")
        allowed_s = min(timeout_s or NO_DEADLINE_S, NO_DEADLINE_S if call_s is None else call_s)
        check_stops(message.stop)
        prompt = await self._encode(message)
        given = message.sampling.max_tokens if message.sampling.HasField("max_tokens") else None
        max_tokens = serving.scheduler.limits.output_tokens(len(prompt), given)
        params = sampling_from(message.sampling, seed=secrets.randbits(63), max_tokens=max_tokens)
        validate(params, self._vocab_size)
        generated = self._ids("generated_token_ids", message.generated_token_ids)
        if len(generated) >= max_tokens:
            remedy = f"at most {max_tokens - 1}: nothing is left of max_tokens={max_tokens}"
            raise InvalidValue("generated_token_ids", f"{len(generated)} ids", remedy)
        if params.json_schema:
            await asyncio.to_thread(self._grammars.check, params.json_schema, generated)
        request = Request(
            Key(uuid.uuid4().hex, 0), prompt, params, arrived_s, message.priority,
            arrived_s + allowed_s, given=len(generated), generated=generated,
            name=message.request_id,
            # A stop string has to be seen as soon as it is complete.
            together=1 if message.stop else max(message.stream_interval, 1),
        )  # fmt: skip
        self._driver.open().submit(request)
        return request

    async def _encode(self, message: pb.GenerateRequest | pb.TokenizeRequest) -> Sequence[int]:
        kind = message.WhichOneof("prompt")
        if kind == "token_ids" and isinstance(message, pb.GenerateRequest):
            return self._ids("token_ids", message.token_ids)
        if kind == "chat":
            turns = [{"role": m.role, "content": m.content} for m in message.chat.messages]
            return await asyncio.to_thread(self._tokenizer.chat, turns)
        special = True
        if isinstance(message, pb.TokenizeRequest) and message.HasField("add_special_tokens"):
            special = message.add_special_tokens
        return await asyncio.to_thread(self._tokenizer.encode, message.text, special)

    def _ids(self, field: str, packed: bytes) -> list[int]:
        ids = unpack_ids(field, packed)
        for token in ids:
            if token >= self._vocab_size:
                raise InvalidValue(field, token, f"ids end at {self._vocab_size - 1}")
        return ids

    def _with_text(self, token: Token) -> Logprobs:
        """The log probabilities of `token` and the text of every id that they name."""
        found = Logprobs()
        found.CopyFrom(token.logprobs)
        found.token = self._tokenizer.token_bytes(token.token_id)
        for alternative in found.alternatives:
            alternative.token = self._tokenizer.token_bytes(alternative.token_id)
        return found

    def _finish(
        self, request: Request, reason: FinishReason.ValueType, text: StreamText
    ) -> pb.Finish:
        now = self._driver.clock()
        return pb.Finish(
            reason=reason,
            prompt_tokens=len(request.prompt),
            completion_tokens=text.tokens,
            stop=text.stopped or "",
            owners=request.owners,
            timings=pb.Timings(
                queue_s=request.placed_s - request.arrived_s,
                prefill_s=request.first_token_s - request.placed_s,
                ttft_s=request.first_token_s - request.arrived_s,
                total_s=now - request.arrived_s,
            ),
        )


async def _next(request: Request) -> tuple[list[Any], FinishReason.ValueType | None]:
    """Every token that is ready, and why the last one is the last."""
    events: list[Event] = [await request.events.get()]
    while not request.events.empty():
        events.append(request.events.get_nowait())
    for event in events:
        if event.error is not None:
            raise event.error
    return [token for event in events for token in event.tokens], events[-1].finish
