"""What clients of the OpenAI API get back, as plain data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tknp.gateway.generation import Piece, finish_name
from tknp.v1.common_pb2 import Logprobs
from tknp.v1.inference_pb2 import Finish, GetModelResponse

Json = dict[str, Any]


@dataclass
class Choice:
    """One choice as it grows. `offset`: characters of text so far."""

    index: int
    offset: int = 0
    tokens: int = 0
    text: list[str] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish: Finish | None = None

    def count(self, piece: Piece) -> None:
        """`piece` has come and is sent on at once."""
        self.offset += len(piece.text)
        self.tokens += len(piece.token_ids)
        self.finish = piece.finish or self.finish

    def add(self, piece: Piece) -> None:
        """`piece` has come and is kept."""
        self.count(piece)
        self.text.append(piece.text)
        self.logprobs += piece.logprobs

    @property
    def reason(self) -> str | None:
        return None if self.finish is None else finish_name(self.finish)


@dataclass(frozen=True)
class Reply:
    """Head of every chunk of one answer. `chat`: which of the two forms it has.

    `prompt_tokens`: of all prompts, each counted once however many choices it has.
    """

    id: str
    model: str
    chat: bool
    logprobs: bool
    prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[Choice]) -> Json:
        """The answer in one piece."""
        return self._head(stream=False) | {
            "choices": [self._choice(choice) for choice in choices],
            "usage": self._usage(choices),
        }

    def first(self, choice: Choice) -> Json:
        """A chat begins by saying who speaks."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk({"index": choice.index, "delta": delta, "finish_reason": None})

    def chunk(self, choice: Choice, piece: Piece, offset: int) -> Json:
        """`piece` of `choice`, whose text so far has `offset` characters."""
        reason = None if piece.finish is None else finish_name(piece.finish)
        found: Json = {"index": choice.index, "finish_reason": reason}
        found |= {"delta": {"content": piece.text}} if self.chat else {"text": piece.text}
        found["logprobs"] = self._logprobs(piece.logprobs, offset) if self.logprobs else None
        if piece.finish is not None and piece.finish.stop:
            found["stop_reason"] = piece.finish.stop
        return self._chunk(found)

    def last(self, choices: Sequence[Choice]) -> Json:
        """What was counted, in a chunk without choices."""
        return self._head(stream=True) | {"choices": [], "usage": self._usage(choices)}

    def _usage(self, choices: Sequence[Choice]) -> Json:
        """Tokens as the pool's tokenizer counts them."""
        output = sum(choice.tokens for choice in choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": self.prompt_tokens + output,
        }

    def _head(self, *, stream: bool) -> Json:
        kind = "text_completion"
        if self.chat:
            kind = "chat.completion.chunk" if stream else "chat.completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choice: Json) -> Json:
        return self._head(stream=True) | {"choices": [choice]}

    def _choice(self, choice: Choice) -> Json:
        text = "".join(choice.text)
        found: Json = {"index": choice.index, "finish_reason": choice.reason}
        if self.chat:
            found["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            found["text"] = text
        found["logprobs"] = self._logprobs(choice.logprobs, 0) if self.logprobs else None
        if choice.finish is not None and choice.finish.stop:
            found["stop_reason"] = choice.finish.stop
        return found

    def _logprobs(self, entries: Sequence[Logprobs], offset: int) -> Json:
        if self.chat:
            return {"content": [_chat_logprob(entry) for entry in entries], "refusal": None}
        texts = [_text(entry.token) for entry in entries]
        offsets = [offset]
        for text in texts[:-1]:
            offsets.append(offsets[-1] + len(text))
        return {
            "tokens": texts,
            "token_logprobs": [entry.chosen for entry in entries],
            "top_logprobs": [
                {_text(a.token): a.logprob for a in entry.alternatives} for entry in entries
            ],
            "text_offset": offsets[: len(texts)],
        }


def models(found: Sequence[GetModelResponse], created: int) -> Json:
    """GET /v1/models."""
    return {"object": "list", "data": [model(entry, created) for entry in found]}


def model(found: GetModelResponse, created: int) -> Json:
    """One entry of it."""
    return {
        "id": found.name,
        "object": "model",
        "created": created,
        "owned_by": "tknp",
        "max_model_len": found.max_model_len,
    }


def _chat_logprob(entry: Logprobs) -> Json:
    alternatives = [_entry(a.token, a.logprob) for a in entry.alternatives]
    return _entry(entry.token, entry.chosen) | {"top_logprobs": alternatives}


def _entry(token: bytes, logprob: float) -> Json:
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode(errors="replace")
