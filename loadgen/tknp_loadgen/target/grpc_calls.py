"""gRPC's streaming calls on HTTP/2: messages in DATA, the outcome in the headers of the end.

Several connections share the load, all open before release. Each would do for thousands of streams,
but a proxy may allow a hundred a connection: more are opened where the server says so.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import unquote, urlsplit

import hpack

from tknp_loadgen.errors import InputError, TargetError
from tknp_loadgen.target.base import Clock, Failure
from tknp_loadgen.target.http2 import Connection

CONNECTIONS = 4
OPEN_TIMEOUT_S = 30.0
PREFIX = struct.Struct(">BI")  # compressed or not, length
STATUSES = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND",
    "ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED",
    "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip


class Answer(Protocol):
    """Where a call's messages go. After `closed` nothing more is told."""

    def released(self) -> None:
        """The request has been written."""

    def message(self, raw: bytes, at_ns: int) -> None:
        """May raise Failure, which ends the call."""

    def retried(self) -> None:
        """The server never saw it: it went out again on another connection."""

    def closed(self, reason: str) -> None:
        """It has ended: with status OK, where `reason` is empty."""


class Channel:
    """Connections to one server for calls of one method."""

    def __init__(
        self, address: str, method: str, clock: Clock, tls: ssl.SSLContext | None = None,
        token: str | None = None,
    ) -> None:  # fmt: skip
        """`address`: HOST:PORT. `method`: /package.Service/Method."""
        try:
            parts = urlsplit(f"//{address}")
            port = parts.port
        except ValueError:
            port = None
        if port is None or not parts.hostname:
            raise InputError("target", address, "must be HOST:PORT")
        self._host, self._port = parts.hostname, port
        self._address, self._clock, self._tls = address, clock, tls
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self._headers = _request_headers(address, method, tls is not None, token)
        self._connections: list[Connection] = []
        self._wanted = 0
        self._opening: set[asyncio.Task[None]] = set()
        self.late = 0

    async def open(self, streams: int) -> None:
        """Connections for so many calls at once; raises TargetError where no server answers."""
        self._connections = [await self._connect()]
        allowed = max(1, self._connections[0].most_streams)
        self._wanted = max(min(CONNECTIONS, streams), -(-streams // allowed))
        more = (self._connect() for _ in range(self._wanted - 1))
        self._connections += await asyncio.gather(*more)

    def begin(self, message: bytes, answer: Answer) -> Call:
        """Send now; `message` with its PREFIX. What goes wrong is told to `answer`."""
        call = Call(self, message, answer)
        call.start()
        return call

    def take(self) -> Connection | None:
        """The least loaded connection that may take a call; a lost one is replaced."""
        best, lost = None, False
        for connection in self._connections:
            if not connection.alive:
                lost = True
            elif connection.usable and (
                best is None or connection.open_streams < best.open_streams
            ):
                best = connection
        if lost:
            self._connections = [c for c in self._connections if c.alive]
        if best is not None and len(self._connections) + len(self._opening) < self._wanted:
            task = asyncio.get_running_loop().create_task(self._replace())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return best

    async def connect(self) -> Connection:
        """A new connection for a call that waits for it; raises Failure."""
        self.late += 1
        try:
            connection = await self._connect()
        except TargetError as error:
            raise Failure(str(error)) from error
        self._connections.append(connection)
        return connection

    def start(self, connection: Connection, message: bytes, call: Call) -> int:
        return connection.start(self._headers, message, call)

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in self._connections:
            connection.abort()

    async def _replace(self) -> None:
        try:
            self._connections.append(await self._connect())
        except TargetError:
            return  # whoever needs it will say so

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
                )
                try:
                    await connection.ready
                except BaseException:  # nobody else knows of it
                    connection.abort()
                    raise
        except (OSError, TimeoutError) as error:
            raise TargetError(f"no gRPC server answers at {self._address}: {error!r}") from error
        return connection


class Call:
    """One call under way: a Stream of HTTP/2."""

    __slots__ = ("_answer", "_channel", "_connection", "_headers", "_message", "_number",
                 "_opening", "_rest", "_retried")  # fmt: skip

    def __init__(self, channel: Channel, message: bytes, answer: Answer) -> None:
        self._channel, self._message, self._answer = channel, message, answer
        self._connection: Connection | None = None
        self._number = 0
        self._opening: asyncio.Task[None] | None = None
        self._rest = b""
        self._headers: Mapping[str, str] = {}
        self._retried = False

    def start(self) -> None:
        connection = self._channel.take()
        if connection is None:
            self._opening = asyncio.get_running_loop().create_task(self._open())
        else:
            self._send(connection)

    def cancel(self) -> None:
        """End it on the server too; the answer hears nothing more."""
        connection, opening = self._connection, self._opening
        self._connection = self._opening = None
        if connection is not None:
            connection.cancel(self._number)
        if opening is not None:
            opening.cancel()

    # http2.Stream

    def data(self, body: bytes, at_ns: int) -> None:
        if self._rest:
            body = self._rest + body
        while len(body) >= PREFIX.size:
            compressed, size = PREFIX.unpack_from(body)
            stop = PREFIX.size + size
            if compressed:
                raise Failure("a compressed message, which was not asked for")
            if len(body) < stop:
                break
            self._answer.message(body[PREFIX.size : stop], at_ns)
            body = body[stop:]
        self._rest = body

    def headers(self, headers: Mapping[str, str]) -> None:
        self._message = b""  # the server has it: it will not be sent again
        self._headers = {**self._headers, **headers} if self._headers else headers

    def closed(self, reason: str, unanswered: bool) -> None:
        self._connection = None
        if unanswered and not self._retried and self._message:
            self._retried = True
            self._answer.retried()
            self.start()
        else:
            self._answer.closed(reason or _outcome(self._headers))

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        self._number = self._channel.start(connection, self._message, self)
        self._answer.released()

    async def _open(self) -> None:
        try:
            connection = await self._channel.connect()
        except Failure as failure:
            self._opening = None
            self._answer.closed(str(failure))
            return
        self._opening = None
        if connection.usable:
            self._send(connection)
        else:
            self._answer.closed("the server closed the connection at once")


def _outcome(headers: Mapping[str, str]) -> str:
    """Why a call failed, by what its headers say; empty: it did not."""
    if headers.get(":status", "200") != "200":
        return f"HTTP {headers[':status']}"
    code = headers.get("grpc-status", "")
    if code == "0":
        return ""
    known = code.isdecimal() and int(code) < len(STATUSES)
    words = " ".join(unquote(headers.get("grpc-message", "")).split())
    name = STATUSES[int(code)] if known else f"status {code or 'missing'}"
    return f"{name}: {words or 'no reason given'}"


def _request_headers(address: str, method: str, secure: bool, token: str | None) -> bytes:
    """Compressed once for all calls: nothing in it depends on what was sent before."""
    headers = [
        (":method", "POST"), (":scheme", "https" if secure else "http"), (":path", method),
        (":authority", address), ("te", "trailers"), ("content-type", "application/grpc"),
        ("user-agent", "tknp-load"),
    ]  # fmt: skip
    if token:
        headers.append(("authorization", f"Bearer {token}"))
    never = [hpack.NeverIndexedHeaderTuple(*header) for header in headers]
    return hpack.Encoder().encode(never, huffman=False)
