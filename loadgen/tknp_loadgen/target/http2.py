"""An HTTP/2 client for many concurrent streams, as small as gRPC needs it.

gRPC's own Python client hands every message from a thread through a pipe to the event loop and to
a task. Here a request is written within `start`, and DATA is handed over inside the protocol's
callback. Requests' headers are compressed once, by hpack, and never indexed.

    start     HEADERS and as much DATA as flow control allows, in one write
    (flow)    the rest follows when the server opens its windows
    (end)     headers of the end, RST_STREAM, GOAWAY or a lost connection end a stream

What is received is never held back: windows are as large as HTTP/2 has them. A server that breaks
the protocol loses the connection, and its streams fail with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol, cast

from tknp_loadgen.target import frames
from tknp_loadgen.target.base import Clock, Failure
from tknp_loadgen.target.blocks import Blocks
from tknp_loadgen.target.frames import HEAD, HEAD_BYTES, Code, Kind, ProtocolError, Setting
from tknp_loadgen.target.sockets import prepare

OURS = {Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: frames.LARGEST_WINDOW}
_REFILL_BYTES = 1 << 30
_LAST_STREAM = 2**31 - 1
_NOTHING = memoryview(b"")
_NO_TABLE = b"\x20"  # tells the server that our compression keeps no table


Buffer = bytes | memoryview


class Stream(Protocol):
    """Where a response goes. After `closed` nothing more is told."""

    def data(self, body: bytes, at_ns: int) -> None:
        """Bytes of the body; may raise Failure, which resets the stream."""

    def headers(self, headers: Mapping[str, str]) -> None:
        """At the beginning, and again at the end (trailers)."""

    def closed(self, reason: str, unanswered: bool) -> None:
        """It has ended: well, where `reason` is empty. `unanswered`: the server never saw it."""


class _Sending:
    """What of a request waits for the server's windows."""

    __slots__ = ("body", "stream", "window")

    def __init__(self, stream: Stream, body: memoryview, window: int) -> None:
        self.stream, self.body, self.window = stream, body, window


class Connection(asyncio.Protocol):
    """One socket and its streams. Never touched outside its event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._transport: asyncio.WriteTransport | None = None
        self._rest = b""
        self._blocks = Blocks()
        self._streams: dict[int, _Sending] = {}
        self._waiting: dict[int, _Sending] = {}  # those of them that are not sent to the end
        self._next = 1
        self._window, self._stream_window = frames.USUAL_WINDOW, frames.USUAL_WINDOW
        self._frame_bytes = frames.USUAL_FRAME_BYTES
        self._received = 0  # since our window was last opened
        self._say_no_table = True
        self._closing = ""  # why it takes no more streams
        self.most_streams = 1 << 30
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    @property
    def alive(self) -> bool:
        """Whether it serves calls, be it as many as it may."""
        return self._transport is not None and not self._closing

    @property
    def usable(self) -> bool:
        """Whether another stream may begin."""
        return (
            self._transport is not None and not self._closing and self._next <= _LAST_STREAM
            and len(self._streams) < self.most_streams and not self._transport.is_closing()
        )  # fmt: skip

    def start(self, headers: bytes, body: bytes, stream: Stream) -> int:
        """Write a request now; returns its number. The connection is usable, `body` not empty."""
        number = self._next
        self._next += 2
        if self._say_no_table:
            self._say_no_table = False
            headers = _NO_TABLE + headers
        sending = _Sending(stream, memoryview(body), self._stream_window)
        self._streams[number] = sending
        pieces: list[Buffer] = [frames.frame(Kind.HEADERS, frames.END_HEADERS, number, headers)]
        self._data(number, sending, pieces)
        if sending.body:
            self._waiting[number] = sending
        self._write(b"".join(pieces))
        return number

    def cancel(self, number: int) -> None:
        """Reset a stream; it hears nothing more."""
        if self._streams.pop(number, None) is not None:
            self._waiting.pop(number, None)
            self._write(frames.number(Kind.RST_STREAM, number, Code.CANCEL))

    def abort(self) -> None:
        self._streams.clear()
        self._waiting.clear()
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        prepare(self._transport)
        wider = frames.LARGEST_WINDOW - frames.USUAL_WINDOW
        self._write(frames.PREFACE + frames.settings(OURS)
                    + frames.number(Kind.WINDOW_UPDATE, 0, wider))  # fmt: skip

    def data_received(self, data: bytes) -> None:
        at_ns = self._clock()
        if self._rest:
            data = self._rest + data
        position, end = 0, len(data)
        try:
            while end - position >= HEAD_BYTES:
                high, low, kind, flags, number = HEAD.unpack_from(data, position)
                start = position + HEAD_BYTES
                stop = start + (high << 8 | low)
                if stop - start > frames.USUAL_FRAME_BYTES:
                    raise ProtocolError("a frame is longer than it may be")
                if stop > end:
                    break
                position = stop
                self._frame(kind, flags, number & _LAST_STREAM, data[start:stop], at_ns)
        except ProtocolError as error:
            self._fail(f"not HTTP/2: {error}")
            return
        self._rest = data[position:]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(self._closing or "the server closed the connection"
                   + (f": {exc!r}" if exc else ""))  # fmt: skip

    # frames

    def _frame(self, kind: int, flags: int, number: int, body: bytes, at_ns: int) -> None:
        if self._blocks.incomplete != (kind == Kind.CONTINUATION):
            raise ProtocolError("headers were interrupted, or go on after their end")
        if kind == Kind.DATA:
            self._on_data(flags, number, body, at_ns)
        elif kind == Kind.HEADERS:
            self._on_block(flags, number, frames.unpad(body, flags, Kind.HEADERS))
        elif kind == Kind.CONTINUATION:
            self._on_block(flags, number, body)
        elif kind == Kind.RST_STREAM:
            code = frames.read_number(body)
            self._close(number, f"the server reset the stream: {frames.code_name(code)}",
                        unanswered=code == Code.REFUSED_STREAM)  # fmt: skip
        elif kind == Kind.SETTINGS:
            if not flags & frames.ACK:
                self._on_settings(body)
        elif kind == Kind.PING:
            if not flags & frames.ACK:
                self._write(frames.frame(Kind.PING, frames.ACK, 0, body))
        elif kind == Kind.GOAWAY:
            self._on_goaway(body)
        elif kind == Kind.WINDOW_UPDATE:
            self._on_window(number, frames.read_number(body) & frames.LARGEST_WINDOW)
        elif kind == Kind.PUSH_PROMISE:
            raise ProtocolError("a push, which was forbidden")

    def _on_data(self, flags: int, number: int, body: bytes, at_ns: int) -> None:
        self._received += len(body)
        if self._received >= _REFILL_BYTES:
            self._write(frames.number(Kind.WINDOW_UPDATE, 0, self._received))
            self._received = 0
        sending = self._streams.get(number)
        if sending is None:
            return  # cancelled a moment ago
        if flags & frames.PADDED:
            body = frames.unpad(body, flags, Kind.DATA)
        if body:
            try:
                sending.stream.data(body, at_ns)
            except Exception as error:
                self.cancel(number)
                sending.stream.closed(str(Failure.of(error)), unanswered=False)
                return
        if flags & frames.END_STREAM:
            self._close(number, "", unanswered=False)

    def _on_block(self, flags: int, number: int, piece: bytes) -> None:
        block = self._blocks.add(flags, number, piece)  # of streams that are gone, too
        if block is None:
            return
        headers, last = block
        sending = self._streams.get(number)
        if sending is not None:
            sending.stream.headers(headers)
        if last:
            self._close(number, "", unanswered=False)

    def _on_settings(self, body: bytes) -> None:
        for name, value in frames.read_settings(body):
            if name == Setting.MAX_CONCURRENT_STREAMS:
                self.most_streams = value
            elif name == Setting.MAX_FRAME_SIZE:
                self._frame_bytes = max(value, frames.USUAL_FRAME_BYTES)
            elif name == Setting.INITIAL_WINDOW_SIZE:
                for sending in self._streams.values():
                    sending.window += value - self._stream_window
                self._stream_window = value
        self._say_no_table = True  # the server may have made its own table smaller
        self._write(frames.frame(Kind.SETTINGS, frames.ACK, 0))
        if not self.ready.done():
            self.ready.set_result(None)
        self._send_on(tuple(self._waiting))

    def _on_goaway(self, body: bytes) -> None:
        last = frames.read_number(body) & _LAST_STREAM
        code = frames.code_name(frames.read_number(body[4:]))
        words = body[8:].decode("utf-8", "replace")
        self._closing = f"the server ends the connection: {code}" + (f", {words}" if words else "")
        for number in [number for number in self._streams if number > last]:
            self._close(number, self._closing, unanswered=True)

    def _on_window(self, number: int, more: int) -> None:
        if number == 0:
            self._window += more
            self._send_on(tuple(self._waiting))
        elif (sending := self._streams.get(number)) is not None:
            sending.window += more
            if number in self._waiting:
                self._send_on((number,))

    # sending

    def _send_on(self, numbers: Iterable[int]) -> None:
        """What waited for a window in these streams, oldest first."""
        pieces: list[Buffer] = []
        for number in numbers:
            if self._window <= 0:
                break
            self._data(number, self._waiting[number], pieces)
            if not self._waiting[number].body:
                del self._waiting[number]
        if pieces:
            self._write(b"".join(pieces))

    def _data(self, number: int, sending: _Sending, pieces: list[Buffer]) -> None:
        """DATA frames as far as both windows allow."""
        while sending.body:
            size = min(len(sending.body), self._frame_bytes, self._window, sending.window)
            if size <= 0:
                return
            body, rest = sending.body[:size], sending.body[size:]
            sending.body = rest or _NOTHING  # an empty rest would hold the whole prompt
            self._window -= size
            sending.window -= size
            flags = 0 if sending.body else frames.END_STREAM
            pieces += (HEAD.pack(size >> 8, size & 0xFF, Kind.DATA, flags, number), body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # ends

    def _close(self, number: int, reason: str, unanswered: bool) -> None:
        sending = self._streams.pop(number, None)
        if sending is not None:
            self._waiting.pop(number, None)
            if sending.body and not reason:  # answered before it was heard to its end
                self._write(frames.number(Kind.RST_STREAM, number, Code.NO_ERROR))
            sending.stream.closed(reason, unanswered)

    def _fail(self, reason: str) -> None:
        self._closing = self._closing or reason
        if not self.ready.done():
            self.ready.set_exception(ConnectionError(reason))
        if self._transport is not None:
            self._transport.abort()
        for number in tuple(self._streams):
            self._close(number, reason, unanswered=False)
