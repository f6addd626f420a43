"""An asyncio client of a pool's public port: Inference and Coordinator.

    prompt + Sampling -> request_for -> Client.generate -> GenerateResponse ... -> Completion

Every call has a deadline. Failures arrive as `tknp.errors`: `InvalidValue` for a malformed target,
`Unavailable` where no server answers, `RequestFailed` with the gRPC status and the server's own
words for everything that the server decided. A stream that ends without `finish` is a failure too.
Leaving an iterator early, or cancelling the task around it, cancels the call on the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from tknp.client.messages import RequestFailed, received_ids
from tknp.config import check_address
from tknp.errors import InvalidValue, ProtocolError, TknpError, Unavailable
from tknp.exposure import is_loopback
from tknp.rpc.bearer import open_channel
from tknp.rpc.ids import pack_ids
from tknp.rpc.limits import RESPONSE_BYTES
from tknp.rpc.pem import read_ca
from tknp.v1.coordinator_pb2 import GetStatusRequest, Status
from tknp.v1.coordinator_pb2_grpc import CoordinatorStub
from tknp.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    GetModelRequest,
    GetModelResponse,
    TokenizeRequest,
)
from tknp.v1.inference_pb2_grpc import InferenceStub

DEFAULT_TARGET = "127.0.0.1:50051"
CALL_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 3600.0
_RETRY_S = 0.1
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", RESPONSE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a proxy meant for the web must not swallow loopback calls
    ("grpc.keepalive_time_ms", 3_000),  # a server that is silently gone ends its streams
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # 60 s else, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # somebody waits for a pool that is starting
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
Q = TypeVar("Q")
A = TypeVar("A")


class Client:
    """One channel to `target` (HOST:PORT). Create and use it inside one running event loop.

    `tls_ca`: PEM file of the certificates to trust; None: plain text. `token`: shown on every call,
    in plain text to loopback only. `retries`: how often a call that nobody answered is made again,
    after 0.1 s and twice as long each time: questions, and generations of which nothing came.
    Raises InvalidValue for what can't be used.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        tls_ca: str | None = None,
        token: str | None = None,
        *,
        retries: int = 0,
    ) -> None:
        if retries < 0:
            raise InvalidValue("retries", retries, "0 (never) or a number of times")
        self.target = check_address("target", target)
        if token and tls_ca is None and not is_loopback(target):
            raise InvalidValue("target", target, "a token goes there over TLS only: give tls_ca")
        tls = grpc.ssl_channel_credentials(read_ca("tls_ca", tls_ca)) if tls_ca else None
        self._channel = open_channel(target, tls, token, _CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)
        self._coordinator = CoordinatorStub(self._channel)
        self._retries = retries
        self._answered = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def status(self, timeout_s: float = CALL_TIMEOUT_S) -> Status:
        return await self._ask(self._coordinator.GetStatus, GetStatusRequest(), timeout_s)

    async def model(self, timeout_s: float = CALL_TIMEOUT_S) -> GetModelResponse:
        return await self._ask(self._inference.GetModel, GetModelRequest(), timeout_s)

    async def tokenize(
        self,
        prompt: str | Sequence[ChatMessage],
        timeout_s: float = CALL_TIMEOUT_S,
        *,
        add_special_tokens: bool = True,
    ) -> list[int]:
        """Ids of a text or a chat. `add_special_tokens`: of a text, such as BOS."""
        if isinstance(prompt, str):
            request = TokenizeRequest(text=prompt, add_special_tokens=add_special_tokens)
        else:
            request = TokenizeRequest(chat=Chat(messages=prompt))
        answer = await self._ask(self._inference.Tokenize, request, timeout_s)
        return received_ids(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float = CALL_TIMEOUT_S) -> str:
        request = DetokenizeRequest(token_ids=pack_ids(token_ids))
        return (await self._ask(self._inference.Detokenize, request, timeout_s)).text

    async def generate(
        self,
        request: GenerateRequest,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Messages as the server sends them; the last one carries `finish`."""
        for wait_s in self._waits():
            came = False
            try:
                async with aclosing(self._stream(request, timeout_s, metadata)) as responses:
                    async for response in responses:
                        came = True
                        yield response
                return
            except TknpError as error:
                # Once something has come, tokens were drawn that a second request draws again.
                if came or wait_s is None or not _unanswered(error):
                    raise
                await asyncio.sleep(wait_s)

    async def _stream(
        self, request: GenerateRequest, timeout_s: float, metadata: Sequence[tuple[str, str]]
    ) -> AsyncGenerator[GenerateResponse, None]:
        call = self._inference.Generate(request, timeout=timeout_s, metadata=metadata)
        finished = False
        try:
            async for response in call:
                self._answered = True
                finished = response.HasField("finish")
                yield response
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        finally:
            call.cancel()
        if not finished:
            raise ProtocolError("the stream ended without a finish reason")

    async def _ask(
        self, method: grpc.aio.UnaryUnaryMultiCallable[Q, A], question: Q, timeout_s: float
    ) -> A:
        waits = self._waits()
        while True:
            try:
                answer = await method(question, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                failure, wait_s = self._failure(error), next(waits)
                if wait_s is None or not _unanswered(failure):
                    raise failure from error
                await asyncio.sleep(wait_s)
            else:
                self._answered = True
                return answer

    def _waits(self) -> Iterator[float | None]:
        """Seconds before the next try; None: there is none."""
        yield from (_RETRY_S * 2**tried for tried in range(self._retries))
        yield None

    def _failure(self, error: grpc.aio.AioRpcError) -> TknpError:
        code, details = error.code().name, " ".join((error.details() or "").split())
        # A server that starts just now may have made the channel READY after this call failed.
        unreached = details.startswith("failed to connect")
        connected = not unreached and self._channel.get_state() == grpc.ChannelConnectivity.READY
        if code not in ("UNAVAILABLE", "DEADLINE_EXCEEDED") or connected:
            return RequestFailed(code, details or "the server gave no reason")
        if self._answered:
            return Unavailable(f"the connection to {self.target} was lost: {details}")
        return Unavailable(
            f"no server answers at {self.target}: start one with `tknp up --model smollm2`, or "
            f"name a running one with --target HOST:PORT, and --tls-ca FILE if it speaks TLS"
        )


def _unanswered(error: TknpError) -> bool:
    """Whether nobody took the call, or whoever did takes none now."""
    code = error.code if isinstance(error, RequestFailed) else error.status
    return code == "UNAVAILABLE"
