"""From OpenAI's fields to the pool's."""

from __future__ import annotations

from collections.abc import Sequence

from tknp.errors import InvalidValue
from tknp.gateway.openai.formats import schema_of
from tknp.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
)
from tknp.model.stops import check_stops
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import ChatMessage

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
_COPIED = ("top_p", "presence_penalty", "frequency_penalty", "min_p", "repetition_penalty")
_ROLES = {"developer": "system"}  # templates of open models know no other word for it


def sampling_of(request: SamplingFields) -> Sampling:
    """Sampling of the first choice; OpenAI's default temperature is 1."""
    sampling = Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        stop_token_ids=request.stop_token_ids or (),
        json_schema=schema_of(request.response_format),
    )
    for name in _COPIED:
        if (value := getattr(request, name)) is not None:
            setattr(sampling, name, value)
    if request.top_k is not None:
        sampling.top_k = max(request.top_k, 0)  # -1 is vLLM's way to say off
    if request.seed is not None:
        sampling.seed = request.seed % 2**64
    for token, bias in (request.logit_bias or {}).items():
        if not token.isascii() or not token.isdecimal() or int(token) >= 2**32:
            raise InvalidValue("logit_bias", token, "keys are token ids")
        sampling.logit_bias[int(token)] = bias
    if (longest := _longest(request)) is not None:
        sampling.max_tokens = longest
    if (logprobs := _logprobs(request)) is not None:
        sampling.logprobs = logprobs
    return sampling


def choice(sampling: Sampling, index: int) -> Sampling:
    """Sampling of choice `index`: draws of its own, repeatable where a seed is given."""
    found = Sampling()
    found.CopyFrom(sampling)
    if found.HasField("seed"):
        found.seed = (found.seed + index) % 2**64
    return found


def stops_of(request: SamplingFields) -> list[str]:
    """Checked stop strings."""
    stops = [request.stop] if isinstance(request.stop, str) else list(request.stop or ())
    check_stops(stops)
    return stops


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """Every prompt of a completion request."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidValue("prompt", [], "must have at least one token")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


def chat_of(messages: Sequence[Message]) -> list[ChatMessage]:
    return [ChatMessage(role=_ROLES.get(m.role, m.role), content=m.text) for m in messages]


def _longest(request: SamplingFields) -> int | None:
    if isinstance(request, ChatRequest):
        given = (request.max_completion_tokens, request.max_tokens)
        if None not in given and given[0] != given[1]:
            raise InvalidValue("max_tokens", given[1], f"max_completion_tokens says {given[0]}")
        return given[1] if given[0] is None else given[0]
    return COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens


def _logprobs(request: SamplingFields) -> int | None:
    if isinstance(request, CompletionRequest):
        if request.best_of is not None and request.best_of != request.n:
            raise InvalidValue("best_of", request.best_of, f"must equal n={request.n} if given")
        return request.logprobs
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return request.top_logprobs or 0
        if request.top_logprobs is not None:
            raise InvalidValue("top_logprobs", request.top_logprobs, "needs logprobs: true")
    return None
