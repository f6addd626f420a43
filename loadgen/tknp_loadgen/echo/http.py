"""The echo server's OpenAI side: /v1/completions and /v1/chat/completions, streamed."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import httptools

from tknp_loadgen.echo.script import Plan, RealTime, Received, Script, Time

_MAX_TOKENS = re.compile(rb'"max_tokens":\s*(\d+)')
_IDS = re.compile(rb'"prompt":\s*\[([^\]]*)\]')


@dataclass
class Seen:
    """What happened at the server."""

    connections: int = 0
    requests: int = 0
    open: int = 0
    most_open: int = 0
    received_ns: list[int] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    cancelled: int = 0


class HttpEcho:
    """A server on a loopback port. `keep_bodies`: remember what was asked.

    `drop` (connection, request of it) hangs up instead of answering, as servers do that give up an
    idle connection just when it is used again; both numbers count from 0.
    """

    def __init__(
        self, plan: Plan, time: Time | None = None, keep_bodies: bool = False,
        drop: Callable[[int, int], bool] | None = None,
    ) -> None:  # fmt: skip
        self.plan = plan
        self.time = time or RealTime()
        self.seen = Seen()
        self.keep_bodies = keep_bodies
        self.drop = drop
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> int:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", port, backlog=4096
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, echo: HttpEcho) -> None:
        self._echo = echo
        self._task: asyncio.Task[None] | None = None
        self._chat = False
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)
        self._number, self._requests = self._echo.seen.connections, 0
        self._echo.seen.connections += 1

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None and not self._task.done():
            self._echo.seen.cancelled += 1
            self._task.cancel()

    def on_url(self, url: bytes) -> None:
        self._chat = b"/chat/" in url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        seen = self._echo.seen
        seen.received_ns.append(time.monotonic_ns())
        body = b"".join(self._body)
        self._body.clear()
        if self._echo.keep_bodies:
            seen.bodies.append(body)
        found, ids = _MAX_TOKENS.search(body), _IDS.search(body)
        received = Received(
            seen.requests, int(found[1]) if found else 16, ids[1].count(b",") + 1 if ids else 7,
            b"continuous_usage_stats" in body,
        )  # fmt: skip
        seen.requests += 1
        drop, self._requests = self._echo.drop, self._requests + 1
        if drop is not None and drop(self._number, self._requests - 1):
            self._transport.abort()
            return
        self._task = asyncio.get_running_loop().create_task(self._respond(received))

    async def _respond(self, received: Received) -> None:
        seen = self._echo.seen
        seen.open += 1
        seen.most_open = max(seen.most_open, seen.open)
        try:
            await self._run(received, self._echo.plan(received))
        finally:
            seen.open -= 1

    async def _run(self, received: Received, script: Script) -> None:
        pause = self._echo.time.pause
        await pause(script.headers_pause_s)
        if script.refusal is not None:
            status, reason = script.refusal
            body = json.dumps({"error": {"message": reason}}).encode() if reason else b""
            self._write(
                f"HTTP/1.1 {status} No\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            )
            return
        self._write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                    b"transfer-encoding: chunked\r\n\r\n")  # fmt: skip
        await self._echo.time.written()
        sent = 0
        for step in script.steps:
            await pause(step.pause_s)
            sent += step.tokens
            self._event(self._chunk(received, step.tokens, sent))
            await self._echo.time.written()
        await pause(script.end_pause_s)
        if script.error is not None:
            self._event(json.dumps({"error": {"message": script.error}}).encode())
        if script.error is not None or script.cut:
            self._write(b"0\r\n\r\n")
            return
        told = sent if script.told_tokens is None else script.told_tokens
        field = '"delta":{}' if self._chat else '"text":""'
        self._event(f'{{"choices":[{{"index":0,{field},"finish_reason":"{script.finish}"}}]}}'
                    .encode())  # fmt: skip
        await self._echo.time.written()
        self._event(b'{"choices":[],"usage":' + _usage(received, told) + b"}")
        self._write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _chunk(self, received: Received, tokens: int, sent: int) -> bytes:
        text = " tok" * tokens
        piece = f'"delta":{{"content":"{text}"}}' if self._chat else f'"text":"{text}"'
        usage = b',"usage":' + _usage(received, sent) if received.chunk_usage else b""
        return f'{{"id":"cmpl-1","choices":[{{"index":0,{piece}}}]'.encode() + usage + b"}"

    def _event(self, data: bytes) -> None:
        self._write(b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data))

    def _write(self, data: bytes) -> None:
        self._transport.write(data)


def _usage(received: Received, tokens: int) -> bytes:
    return b'{"prompt_tokens":%d,"completion_tokens":%d}' % (received.prompt_tokens, tokens)
