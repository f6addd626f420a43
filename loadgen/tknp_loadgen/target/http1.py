"""An HTTP/1.1 client for many concurrent streams: connections opened ahead, bytes stamped at once.

httptools parses; this keeps connections. A request is written within `start`, and bodies are handed
over inside the protocol's callback, so that a stamp is taken when the event loop gets the bytes and
not when some task gets its turn. There is no limit to a line: whatever the event loop reads is
taken.

    open      N connections at once, none of which a measured request has to wait for
    take      an idle one, the most recently used
    connect   a new one, where none is idle: counted as late
    (end)     a connection goes back to the pool by itself, unless the server wants it closed
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol, cast

import httptools

from tknp_loadgen.errors import TargetError
from tknp_loadgen.target.base import Clock, Failure
from tknp_loadgen.target.sockets import prepare

OPEN_TIMEOUT_S = 30.0
SPARE = 8  # connections kept open beyond those in use
ERROR_BODY_BYTES = 4096


class Lost(Failure):
    """The connection ended before the response did. `unanswered`: before a byte of it."""

    def __init__(self, reason: str, unanswered: bool) -> None:
        super().__init__(reason)
        self.unanswered = unanswered


class Response(Protocol):
    """Where a response goes. After `complete` or `failed` nothing more is told."""

    def body(self, data: bytes, at_ns: int) -> None:
        """Bytes of a response with status 200; may raise Failure, which ends it."""

    def complete(self) -> None:
        """Its end; what it raises goes to `failed`."""

    def failed(self, failure: Failure) -> None: ...


class Connection(asyncio.Protocol):
    """One socket, one request at a time. Never touched outside its event loop."""

    __slots__ = ("_answered", "_at_ns", "_clock", "_error_body", "_parser", "_pool", "_response",
                 "_status", "_transport", "_until_close", "pooled")  # fmt: skip

    def __init__(self, pool: Pool, clock: Clock) -> None:
        self._pool = pool
        self._clock = clock
        self._transport: asyncio.WriteTransport | None = None
        self._response: Response | None = None
        self._at_ns = 0
        self._parser: httptools.HttpResponseParser | None = None
        self._status = 0
        self._answered = False
        self._until_close = False
        self._error_body = b""
        self.pooled = False  # it has been idle, so that the server may have given it up

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def start(self, request: bytes, response: Response) -> None:
        """Write a request now; the connection must be usable."""
        self._response = response
        self._answered, self._status = False, 0
        cast("asyncio.WriteTransport", self._transport).write(request)

    def abort(self) -> None:
        """Close at once: how HTTP/1.1 cancels a request. Its response hears nothing more."""
        self._response = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        prepare(self._transport)

    def data_received(self, data: bytes) -> None:
        self._at_ns = self._clock()
        if self._response is None:
            self.abort()  # bytes that nobody asked for
            return
        if not self._answered:  # a parser is of one response: made here, off the way out
            self._answered, self._until_close = True, False
            self._error_body = b""
            self._parser = httptools.HttpResponseParser(self)
        try:
            cast("httptools.HttpResponseParser", self._parser).feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback of ours raised, if one did
            self._fail(Failure.of(cause) if cause else Failure(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._response is None:
            self._parser = None
            return
        if self._status and exc is None and self._until_close:
            self.on_message_complete()
            return
        when = "within its response" if self._answered else "before its response"
        reason = f"the server closed the connection {when}" + (f": {exc!r}" if exc else "")
        self._fail(Lost(reason, unanswered=not self._answered))

    # httptools' callbacks

    def on_message_begin(self) -> None:
        self._until_close = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        self._status = cast("httptools.HttpResponseParser", self._parser).get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._error_body = (self._error_body + body)[:ERROR_BODY_BYTES]
        elif self._response is not None:
            self._response.body(body, self._at_ns)

    def on_message_complete(self) -> None:
        parser, response = self._parser, self._response
        self._parser = self._response = None
        keep = parser is not None and parser.should_keep_alive() and not self._until_close
        if keep:
            self._pool.release(self)
        elif self._transport is not None:
            self._transport.close()
        if response is None:
            return
        if self._status == 200:
            try:
                response.complete()
            except Exception as error:
                response.failed(Failure.of(error))
        else:
            words = " ".join(self._error_body.decode("utf-8", "replace").split())
            response.failed(Failure(f"HTTP {self._status}: {words or 'no reason given'}"))

    def _fail(self, failure: Failure) -> None:
        response, self._response = self._response, None
        self._parser = None  # it refers to this connection: a cycle, and nobody collects those
        if self._transport is not None:
            self._transport.abort()
        if response is not None:
            response.failed(failure)


class Pool:
    """Connections to one server."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, clock: Clock) -> None:
        self._host, self._port, self._tls, self._clock = host, port, tls, clock
        self._idle: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self.late = 0

    async def open(self, count: int) -> None:
        """Raises TargetError where the server takes no connection."""
        for connection in await asyncio.gather(*(self._connect() for _ in range(count))):
            self.release(connection)

    def take(self) -> Connection | None:
        """An idle connection, if there is one; others are opened where few are left."""
        found = None
        while self._idle and found is None:
            connection = self._idle.pop()
            if connection.usable:
                found = connection
        if len(self._idle) + len(self._opening) < SPARE:
            task = asyncio.get_running_loop().create_task(self._open_spare())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return found

    async def connect(self) -> Connection:
        """A new connection for a request that waits for it; raises Failure."""
        self.late += 1
        try:
            return await self._connect()
        except TargetError as error:
            raise Failure(str(error)) from error

    def release(self, connection: Connection) -> None:
        if connection.usable:
            connection.pooled = True
            self._idle.append(connection)

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _open_spare(self) -> None:
        try:
            connection = await self._connect()
        except TargetError:
            return  # whoever needs it will say so
        connection.pooled = True
        self._idle.insert(0, connection)  # those in use stay warm

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, self._clock), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise TargetError(
                f"no server answers at {self._host}:{self._port}: {error!r}"
            ) from error
        return connection
