"""An HTTP/1.1 client for many concurrent streams: connections opened ahead, bytes stamped at once.

httptools parses; this keeps connections. Bodies are handed over inside the protocol's callback, so
that a stamp is taken when the event loop gets the bytes and not when some task gets its turn. There
is no read buffer to fill and no limit to a line: whatever the socket holds is taken, up to 256 KiB
at once.

    open      N connections at once, none of which a measured request has to wait for
    acquire   an idle one, the most recently used; else a new one, which is counted
    release   back to the pool, unless the server wants it closed
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast

import httptools

from tknp_loadgen.errors import TargetError
from tknp_loadgen.target.base import Clock, Failure

OPEN_TIMEOUT_S = 30.0
SPARE = 8  # connections kept open beyond those in use
ERROR_BODY_BYTES = 4096
OnBody = Callable[[bytes, int], None]


class Lost(Failure):
    """The connection ended before the response did. `unanswered`: before a byte of it."""

    def __init__(self, reason: str, unanswered: bool) -> None:
        super().__init__(reason)
        self.unanswered = unanswered


class Connection(asyncio.Protocol):
    """One socket, one request at a time. Never touched outside its event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.WriteTransport | None = None
        self._on_body: OnBody | None = None
        self._done: asyncio.Future[int] | None = None
        self._at_ns = 0
        self._parser = httptools.HttpResponseParser(self)
        self._status = 0
        self._answered = False
        self._until_close = False
        self._error_body = b""
        self.pooled = False  # it has been idle, so that the server may have given it up

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def start(self, request: bytes, on_body: OnBody) -> asyncio.Future[int]:
        """Write a request; the future brings the status once the response is complete."""
        if self._transport is None or self._transport.is_closing():
            raise Lost("the server closed the connection", unanswered=True)
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._status, self._answered, self._until_close = 0, False, False
        self._error_body = b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def abort(self) -> None:
        """Close at once: how HTTP/1.1 cancels a request."""
        self._done = None
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)

    def data_received(self, data: bytes) -> None:
        self._at_ns = self._clock()
        if self._done is None:
            self.abort()  # bytes that nobody asked for
            return
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            cause = error.__context__  # what a callback of ours raised, if one did
            self._fail(cause if isinstance(cause, Failure) else Failure(f"not HTTP: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._done is None:
            return
        if self._answered and exc is None and self._until_close:
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
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._error_body = (self._error_body + body)[:ERROR_BODY_BYTES]
        elif self._on_body is not None:
            self._on_body(body, self._at_ns)

    def on_message_complete(self) -> None:
        done, self._done = self._done, None
        keep = self._parser.should_keep_alive() and not self._until_close
        if not keep and self._transport is not None:
            self._transport.close()
        if done is None or done.done():
            return
        if self._status == 200:
            done.set_result(self._status)
        else:
            words = " ".join(self._error_body.decode("utf-8", "replace").split())
            done.set_exception(Failure(f"HTTP {self._status}: {words or 'no reason given'}"))

    def _fail(self, failure: Failure) -> None:
        done, self._done = self._done, None
        if done is not None and not done.done():
            done.set_exception(failure)
        if self._transport is not None:
            self._transport.abort()


class Pool:
    """Connections to one server."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, clock: Clock) -> None:
        self._host, self._port, self._tls, self._clock = host, port, tls, clock
        self._idle: list[Connection] = []
        self._opening: set[asyncio.Task[None]] = set()
        self._busy: set[Connection] = set()
        self.late = 0
        self.opened = 0

    async def open(self, count: int) -> None:
        """Raises TargetError where the server takes no connection."""
        for connection in await asyncio.gather(*(self._connect() for _ in range(count))):
            self._keep(connection)

    async def acquire(self) -> Connection:
        """Raises Failure where no connection can be had."""
        connection = self._take()
        if connection is None:
            self.late += 1
            try:
                connection = await self._connect()
            except TargetError as error:
                raise Failure(str(error)) from error
        self._busy.add(connection)
        if len(self._idle) + len(self._opening) < SPARE:
            task = asyncio.get_running_loop().create_task(self._open_spare())
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return connection

    def release(self, connection: Connection) -> None:
        self._busy.discard(connection)
        if connection.usable:
            self._keep(connection)

    async def close(self) -> None:
        for task in self._opening:
            task.cancel()
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()

    def _keep(self, connection: Connection) -> None:
        connection.pooled = True
        self._idle.append(connection)

    def _take(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

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
                    lambda: Connection(self._clock), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            raise TargetError(
                f"no server answers at {self._host}:{self._port}: {error!r}"
            ) from error
        self.opened += 1
        return connection
