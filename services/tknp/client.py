"""An asyncio client of a pool's public port: Inference and Coordinator.

    prompt + Sampling -> request_for -> Client.generate -> GenerateResponse ... -> Completion

Every call has a deadline. Failures arrive as `tknp.errors`: `InvalidValue` for a malformed target,
`Unavailable` where no server answers, `RequestFailed` with the gRPC status and the server's own
words for everything that the server decided. A stream that ends without `finish` is a failure too.
Leaving an iterator early, or cancelling the task around it, cancels the call on the server.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

import grpc
import grpc.aio

from tknp.config import check_address
from tknp.errors import InvalidValue, ProtocolError, TknpError, Unavailable
from tknp.exposure import is_loopback
from tknp.rpc.bearer import open_channel
from tknp.rpc.ids import pack_ids, unpack_ids
from tknp.rpc.limits import RESPONSE_BYTES
from tknp.rpc.pem import read_ca
from tknp.v1.common_pb2 import Logprobs, Sampling
from tknp.v1.coordinator_pb2 import GetStatusRequest, Status
from tknp.v1.coordinator_pb2_grpc import CoordinatorStub
from tknp.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    Finish,
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
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", RESPONSE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a proxy meant for the web must not swallow loopback calls
    ("grpc.keepalive_time_ms", 4_000),  # a server that is silently gone ends its streams
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),  # somebody waits for a pool that is starting
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

Prompt = str | Sequence[int] | Sequence[ChatMessage]
T = TypeVar("T")


class RequestFailed(TknpError):
    """The server ended a call with an error: `code` is the gRPC status name."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.status = code


def received_ids(data: bytes) -> list[int]:
    """Token ids that a server sent; raises ProtocolError where they are malformed."""
    try:
        return unpack_ids("token_ids", data)
    except InvalidValue as error:
        raise ProtocolError(f"the server sent {error}") from error


def request_for(
    prompt: Prompt, sampling: Sampling | None = None, request_id: str = ""
) -> GenerateRequest:
    """Text is sent as it is, messages through the checkpoint's chat template, ids unchanged."""
    request = GenerateRequest(request_id=request_id, sampling=sampling)
    if isinstance(prompt, str):
        request.text = prompt
        return request
    messages = [item for item in prompt if isinstance(item, ChatMessage)]
    if messages:
        request.chat.CopyFrom(Chat(messages=messages))
    else:
        ids = [item for item in prompt if not isinstance(item, ChatMessage)]
        request.token_ids = pack_ids(ids)
    return request


@dataclass
class Completion:
    """What a stream has brought so far. Times are the caller's clock, in seconds.

    TTFT ends with the first message that carries a token. Gaps between messages are divided by
    the tokens of the later message, so a message of several tokens does not inflate ITL.
    """

    started_s: float
    request_id: str = ""
    prompt_tokens: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: Finish | None = None
    first_token_s: float | None = None
    first_tokens: int = 0
    last_token_s: float | None = None
    ended_s: float | None = None

    def add(self, response: GenerateResponse, now_s: float) -> None:
        """Fold the next message in; raises ProtocolError on a malformed one."""
        token_ids = received_ids(response.token_ids)
        if response.HasField("accepted"):
            self.request_id = response.accepted.request_id
            self.prompt_tokens = response.accepted.prompt_tokens
        if token_ids:
            if self.first_token_s is None:
                self.first_token_s, self.first_tokens = now_s, len(token_ids)
            self.last_token_s = now_s
        self.token_ids += token_ids
        self.text += response.text
        self.logprobs += response.logprobs
        if response.HasField("finish"):
            self.finish = response.finish
            self.ended_s = now_s

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def total_s(self) -> float | None:
        return None if self.ended_s is None else self.ended_s - self.started_s

    @property
    def itl_s(self) -> float | None:
        """Mean inter-token latency; None below two messages with tokens."""
        later = len(self.token_ids) - self.first_tokens
        if self.first_token_s is None or self.last_token_s is None or later < 1:
            return None
        return (self.last_token_s - self.first_token_s) / later


class Client:
    """One channel to `target` (HOST:PORT). Create and use it inside one running event loop.

    `tls_ca`: PEM file of the certificates to trust; None: plain text. `token`: shown on every call,
    in plain text to loopback only. Raises InvalidValue for what can't be used.
    """

    def __init__(
        self, target: str = DEFAULT_TARGET, tls_ca: str | None = None, token: str | None = None
    ) -> None:
        self.target = check_address("target", target)
        if token and tls_ca is None and not is_loopback(target):
            raise InvalidValue("target", target, "a token goes there over TLS only: give tls_ca")
        tls = grpc.ssl_channel_credentials(read_ca("tls_ca", tls_ca)) if tls_ca else None
        self._channel = open_channel(target, tls, token, _CHANNEL_OPTIONS)
        self._inference = InferenceStub(self._channel)
        self._coordinator = CoordinatorStub(self._channel)
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
        return await self._answer(
            self._coordinator.GetStatus(GetStatusRequest(), timeout=timeout_s)
        )

    async def model(self, timeout_s: float = CALL_TIMEOUT_S) -> GetModelResponse:
        return await self._answer(self._inference.GetModel(GetModelRequest(), timeout=timeout_s))

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
        answer = await self._answer(self._inference.Tokenize(request, timeout=timeout_s))
        return received_ids(answer.token_ids)

    async def detokenize(self, token_ids: Sequence[int], timeout_s: float = CALL_TIMEOUT_S) -> str:
        request = DetokenizeRequest(token_ids=pack_ids(token_ids))
        return (await self._answer(self._inference.Detokenize(request, timeout=timeout_s))).text

    async def generate(
        self,
        request: GenerateRequest,
        timeout_s: float = GENERATE_TIMEOUT_S,
        metadata: Sequence[tuple[str, str]] = (),
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Messages as the server sends them; the last one carries `finish`."""
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

    async def _answer(self, call: Awaitable[T]) -> T:
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            raise self._failure(error) from error
        self._answered = True
        return answer

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
