"""What is sent to a pool and what comes back: requests, completions, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tknp.errors import InvalidValue, ProtocolError, TknpError
from tknp.rpc.ids import pack_ids, unpack_ids
from tknp.v1.common_pb2 import Logprobs, Sampling
from tknp.v1.inference_pb2 import Chat, ChatMessage, Finish, GenerateRequest, GenerateResponse

Prompt = str | Sequence[int] | Sequence[ChatMessage]


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
