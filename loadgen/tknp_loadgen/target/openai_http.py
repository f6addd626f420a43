"""OpenAI's HTTP API, completions and chat, streamed.

How many tokens a chunk holds, best source first: cumulative `usage` in the chunk itself
(`continuous_usage_stats`, which is asked for), `token_ids`, else one for a chunk that says
anything. The final `usage` is the server's count of all; text is never tokenized again. Neither
that event nor `[DONE]` nor an empty delta moves any time.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tknp_loadgen.errors import InputError
from tknp_loadgen.target.base import Call, Clock, Ending, Failure, Sink
from tknp_loadgen.target.http1 import Connection, Lost, Pool
from tknp_loadgen.target.sse import Events
from tknp_loadgen.trace.prompts import Prompt


@dataclass(frozen=True)
class HttpSettings:
    """`url` ends in /v1, as OpenAI clients write it. `extra` is merged into every body."""

    url: str
    model: str
    chat: bool = False
    ignore_eos: bool = True
    chunk_usage: bool = True
    token: str | None = None
    tls: ssl.SSLContext | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class OpenAiHttp:
    """A server of `/v1/completions` or `/v1/chat/completions`."""

    def __init__(self, settings: HttpSettings, clock: Clock) -> None:
        parts = urlsplit(settings.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError("target", settings.url, "must be http://HOST:PORT/v1")
        self._settings = settings
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        tls = (settings.tls or ssl.create_default_context()) if secure else None
        self._pool = Pool(parts.hostname, port, tls, clock)
        path = parts.path.rstrip("/") + ("/chat/completions" if settings.chat else "/completions")
        lines = [
            f"POST {path} HTTP/1.1", f"host: {parts.netloc}", "content-type: application/json",
            "accept: text/event-stream", "accept-encoding: identity", "connection: keep-alive",
        ]  # fmt: skip
        if settings.token:
            lines.append(f"authorization: Bearer {settings.token}")
        self._head = "\r\n".join(lines)

    @property
    def late_connections(self) -> int:
        return self._pool.late

    async def open(self, connections: int) -> None:
        await self._pool.open(connections)

    def encode(self, prompt: Prompt, output_tokens: int) -> bytes:
        settings = self._settings
        usage = {"include_usage": True}
        if settings.chunk_usage:
            usage["continuous_usage_stats"] = True
        body: dict[str, Any] = {
            "model": settings.model, "max_tokens": output_tokens, "temperature": 0.0,
            "stream": True, "stream_options": usage,
        }  # fmt: skip
        if settings.ignore_eos:
            body["ignore_eos"] = True
        body |= settings.extra
        if settings.chat:
            if prompt.text is None:
                raise InputError("prompts", "ids", "chat takes text: make the trace with "
                                 "--prompts text, or use --endpoint completions")  # fmt: skip
            body["messages"] = [{"role": "user", "content": prompt.text}]
        elif prompt.ids is not None:
            body["prompt"] = prompt.ids.tolist()
        else:
            body["prompt"] = prompt.text
        encoded = json.dumps(body, separators=(",", ":")).encode()
        return f"{self._head}\r\ncontent-length: {len(encoded)}\r\n\r\n".encode() + encoded

    def begin(self, payload: bytes, sink: Sink) -> Call:
        exchange = _Exchange(self._pool, payload, sink)
        exchange.start()
        return exchange

    async def close(self) -> None:
        await self._pool.close()


class _Exchange:
    """One request and its response; a second try where the server gave up an idle connection."""

    __slots__ = ("_connection", "_opening", "_payload", "_pool", "_retried", "_sink", "_stream")

    def __init__(self, pool: Pool, payload: bytes, sink: Sink) -> None:
        self._pool, self._payload, self._sink = pool, payload, sink
        self._stream = _Stream(sink)
        self._connection: Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._retried = False

    def start(self) -> None:
        connection = self._pool.take()
        if connection is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        else:
            self._send(connection)

    def cancel(self) -> None:
        connection, opening = self._connection, self._opening
        self._connection = self._opening = None
        if connection is not None:
            connection.abort()
        if opening is not None:
            opening.cancel()

    # http1.Response

    def body(self, data: bytes, at_ns: int) -> None:
        self._payload = b""  # the server has it: it will not be sent again
        self._stream.feed(data, at_ns)

    def complete(self) -> None:
        self._connection = None
        try:
            ending = self._stream.end()
        except Failure as failure:
            self._sink.failed(str(failure))
        else:
            self._sink.ended(ending)

    def failed(self, failure: Failure) -> None:
        connection, self._connection = self._connection, None
        given_up = isinstance(failure, Lost) and failure.unanswered
        if given_up and connection is not None and connection.pooled and not self._retried:
            # The server gave up an idle connection just when it was used: nothing has happened.
            self._retried = True
            self._sink.retried()
            self.start()
        else:
            self._sink.failed(str(failure))

    def _send(self, connection: Connection) -> None:
        if not connection.usable:  # it did not live to be used
            self.failed(Lost("the server closed the connection at once", unanswered=True))
            return
        self._connection = connection
        connection.start(self._payload, self)
        self._sink.released()

    async def _open(self) -> None:
        try:
            connection = await self._pool.connect()
        except Failure as failure:
            self._opening = None
            self._sink.failed(str(failure))
        else:
            self._opening = None
            self._send(connection)


class _Stream:
    """One response: what its events say."""

    __slots__ = ("_closed", "_counted", "_events", "_finish", "_sink", "_usage")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._events = Events()
        self._counted = 0
        self._usage: Mapping[str, Any] | None = None
        self._finish: str | None = None
        self._closed = False

    def feed(self, data: bytes, at_ns: int) -> None:
        for event in self._events.feed(data):
            self._event(event, at_ns)

    def end(self) -> Ending:
        for event in self._events.end():
            if event != b"[DONE]":
                raise Failure("the stream ended within an event")
            self._closed = True
        if not self._closed and self._finish is None:
            raise Failure("the stream ended without a finish reason")
        usage = self._usage or {}
        return Ending(
            finish=self._finish,
            completion_tokens=usage.get("completion_tokens", self._counted),
            prompt_tokens=usage.get("prompt_tokens"),
        )

    def _event(self, event: bytes, at_ns: int) -> None:
        if event == b"[DONE]":
            self._closed = True
            return
        try:
            message = json.loads(event)
        except ValueError as error:
            raise Failure(f"an event is not JSON: {error}") from None
        if not isinstance(message, dict):
            raise Failure("an event is not a JSON object")
        if message.get("error"):
            raise Failure(f"the server sent an error: {json.dumps(message['error'])[:500]}")
        usage = message.get("usage")
        choices = message.get("choices") or ()
        if usage:
            self._usage = usage
        if not choices:
            return
        choice = choices[0]
        self._finish = choice.get("finish_reason") or self._finish
        piece = _piece(choice)
        count = 1 if piece else 0
        if usage and "completion_tokens" in usage:
            count = usage["completion_tokens"] - self._counted
        elif choice.get("token_ids"):
            count = len(choice["token_ids"])
        if count > 0:
            self._counted += count
            self._sink.tokens(count, at_ns)
        if isinstance(piece, str) and piece:
            self._sink.text(piece)


def _piece(choice: Mapping[str, Any]) -> Any:
    """Text of a chunk, or whatever else counts as a token of it."""
    if "text" in choice:
        return choice["text"]
    delta = choice.get("delta") or {}
    return (
        delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        or delta.get("tool_calls")
    )  # fmt: skip
