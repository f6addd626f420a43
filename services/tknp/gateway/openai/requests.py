"""Bodies of the OpenAI API as they are taken; what is unknown is refused by name.

Fields that change nothing here (`user`, `metadata`, `store`, `service_tier`) are taken and ignored.
Ranges that the pool checks itself are not repeated: it refuses with field, value and remedy.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt

from tknp.gateway.openai.formats import ResponseFormat
from tknp.sampling.params import MAX_LOGPROBS, MAX_SEED

MAX_CHOICES = 16
Ids = list[Annotated[StrictInt, Field(ge=0, lt=2**32)]]
Stops = str | list[str]


class StreamOptions(BaseModel):
    """`include_usage`: a last chunk without choices says what was counted."""

    model_config = ConfigDict(extra="forbid")

    include_usage: StrictBool = False
    include_obfuscation: StrictBool = False  # known, and never done


class SamplingFields(BaseModel):
    """What both kinds of completion take. The lower half is not OpenAI's but vLLM's and ours."""

    model_config = ConfigDict(extra="forbid")

    model: str
    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] = 1
    stop: Stops | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[StrictInt, Field(ge=1, lt=2**32)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[StrictInt, Field(ge=-(2**63), le=MAX_SEED)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: StrictBool | None = None
    service_tier: str | None = None

    top_k: Annotated[StrictInt, Field(ge=-1, lt=2**32)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: StrictBool = False
    min_tokens: Annotated[StrictInt, Field(ge=0, lt=2**32)] = 0
    stop_token_ids: Ids | None = None
    priority: Annotated[StrictInt, Field(ge=-(2**31), lt=2**31)] = 0
    timeout_s: Annotated[float, Field(gt=0)] | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions. `prompt`: a text, ids, or a list of either, each answered."""

    prompt: str | Ids | list[str] | list[Ids]
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: Literal[False] = False
    best_of: Annotated[StrictInt, Field(ge=1)] | None = None
    suffix: None = None


class TextPart(BaseModel):
    """A piece of a message; only text is served."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One turn of a chat."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, lt=2**32)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeRequest(BaseModel):
    """POST /tokenize: a prompt or a chat."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    tokens: Ids
