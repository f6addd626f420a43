"""Streams of stamped tokens, read from a pool's port or through a gateway before it.

    stamped_pool (tokens that say when they were due) <- gateway <- readers here, who subtract

All processes share this machine's cores, the reader among them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tknp.cli.ports import free_ports
from tknp.cli.processes import Command, Supervisor
from tknp.client import Client, request_for
from tknp.v1.common_pb2 import Sampling

NAME = "stamped"
STAMPED = Path(__file__).parent / "stamped_pool.py"
_LOOPBACK = "127.0.0.1"
_LOOK_S = 0.2


@dataclass
class Seen:
    """Of streams: milliseconds from due to read of later chunks, from request to the first."""

    chunk_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: int = 0

    def chunk(self, text: str, began: float) -> None:
        """A chunk of a stream that `began` then (time.monotonic)."""
        now = time.monotonic_ns()
        stamps = [int(stamp) for stamp in text.split()]
        if not stamps:
            return
        if self.tokens == 0:
            self.first_ms.append(now / 1e6 - began * 1e3)
        else:
            self.chunk_ms += [(now - stamp) / 1e6 for stamp in stamps]
        self.tokens += len(stamps)

    def add(self, other: Seen) -> None:
        self.chunk_ms += other.chunk_ms
        self.first_ms += other.first_ms
        self.tokens += other.tokens
        self.ended += other.ended

    def at_ms(self, share: float) -> float:
        """The latency of a chunk below which `share` of them lie."""
        return at(self.chunk_ms, share)


def at(values: list[float], share: float) -> float:
    """The value below which `share` of `values` lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


Reader = Callable[[int, int, Seen], Coroutine[None, None, None]]


async def direct(port: int, tokens: int, seen: Seen) -> None:
    """One stream from the pool itself, on a connection of its own."""
    async with Client(f"{_LOOPBACK}:{port}") as client:
        await over(client)(port, tokens, seen)


def over(client: Client) -> Reader:
    """Streams from the pool over the connection of `client`."""

    async def read(_: int, tokens: int, seen: Seen) -> None:
        began = time.monotonic()
        async for response in client.generate(request_for([1], Sampling(max_tokens=tokens))):
            seen.chunk(response.text, began)
            seen.ended += response.HasField("finish")

    return read


async def through(port: int, tokens: int, seen: Seen, prompt: str | None = None) -> None:
    """One stream of server-sent events, read with nothing but a socket."""
    asked = {"model": NAME, "prompt": prompt or [1], "max_tokens": tokens, "stream": True}
    body = json.dumps(asked).encode()
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(_LOOPBACK, port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices", ())
            seen.chunk("".join(choice["text"] for choice in choices), began)
        seen.ended += line.startswith(b"data: [DONE]")
    writer.close()


async def measure(readers: list[Reader], port: int, streams: int, tokens: int) -> Seen:
    """`streams` at once, begun over one second, dealt out to `readers`."""

    async def one(number: int) -> Seen:
        await asyncio.sleep(number / streams)
        seen = Seen()
        await readers[number % len(readers)](port, tokens, seen)
        return seen

    found = Seen()
    for seen in await asyncio.gather(*(one(number) for number in range(streams))):
        found.add(seen)
    return found


@asynccontextmanager
async def stamped(rate: float, *, together: bool = False) -> AsyncIterator[tuple[int, int]]:
    """A pool of `rate` tokens/s a stream: its port and the id of its process."""
    (port,) = free_ports(1)
    argv = [sys.executable, str(STAMPED), str(port), str(rate), *(["together"] * together)]
    async with Supervisor() as supervisor:
        started = await supervisor.start(Command("pool", argv))
        yield port, started.pid


@asynccontextmanager
async def gateway(pool: int, *, model: str = NAME, flags: Sequence[str] = ()) -> AsyncIterator[int]:
    """A gateway of one replica before the pool of `model` at port `pool`: its HTTP port.

    `flags`: more of its command line.
    """
    (http,) = free_ports(1)
    argv = [
        sys.executable, "-m", "tknp.cli.main", "gateway", "--http-port", str(http),
        "--pool-target", f"{_LOOPBACK}:{pool}", "--max-replicas", "1", *flags,
    ]  # fmt: skip
    async with Supervisor() as supervisor:
        await supervisor.start(Command("gateway", argv))
        await supervisor.guard(_serves(http, model))
        yield http


async def _serves(port: int, model: str) -> None:
    """Wait until the gateway at `port` knows `model`."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(_LOOPBACK, port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
        except OSError:
            answer = b""
        if json.dumps(model).encode() in answer:
            return
        await asyncio.sleep(_LOOK_S)
