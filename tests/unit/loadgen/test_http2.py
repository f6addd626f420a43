"""The HTTP/2 client against a server that says whatever a test wants, byte by byte."""

from __future__ import annotations

import array
import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import hpack
import pytest

from tknp_loadgen.errors import TargetError
from tknp_loadgen.target import frames
from tknp_loadgen.target.blocks import Blocks
from tknp_loadgen.target.frames import HEAD, Kind, Setting
from tknp_loadgen.target.grpc_calls import PREFIX, Channel

REPLY = [(":status", "200"), ("content-type", "application/grpc")]
GOOD = [("grpc-status", "0")]


@dataclass
class Server:
    """One connection: frames that came, and whatever is to be said."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    encoder: hpack.Encoder = field(default_factory=hpack.Encoder)

    async def next(self, kind: Kind) -> tuple[int, int, bytes]:
        """The next frame of a kind, as flags, stream, body; others are passed over."""
        while True:
            head = await self.reader.readexactly(frames.HEAD_BYTES)
            high, low, found, flags, number = HEAD.unpack(head)
            body = await self.reader.readexactly(high << 8 | low)
            if found == kind:
                return flags, number, body

    def say(self, kind: Kind, flags: int, number: int, body: bytes = b"") -> None:
        self.writer.write(frames.frame(kind, flags, number, body))

    def headers(self, number: int, headers: list[tuple[str, str]], flags: int = 0) -> None:
        self.say(Kind.HEADERS, flags | frames.END_HEADERS, number, self.encoder.encode(headers))

    def message(self, number: int, text: bytes) -> None:
        self.say(Kind.DATA, 0, number, PREFIX.pack(0, len(text)) + text)

    def finish(self, number: int, headers: list[tuple[str, str]]) -> None:
        self.headers(number, headers, frames.END_STREAM)


class Answer:
    """Keeps what a call is told."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.retries = 0
        self.sent = 0
        self.done: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def released(self) -> None:
        self.sent += 1

    def retried(self) -> None:
        self.retries += 1

    def message(self, raw: bytes, at_ns: int) -> None:
        self.messages.append(raw)

    def closed(self, reason: str) -> None:
        self.done.set_result(reason)


class Net:
    """A channel and the servers behind its connections, in order of connecting."""

    def __init__(self) -> None:
        self.channel: Channel
        self.servers: asyncio.Queue[Server] = asyncio.Queue()

    def call(self, text: bytes = b"hello") -> tuple[Answer, bytes]:
        answer = Answer()
        message = PREFIX.pack(0, len(text)) + text
        self.last = self.channel.begin(message, answer)
        return answer, message


@asynccontextmanager
async def net(settings: Mapping[Setting, int] | None = None) -> AsyncIterator[Net]:
    made = Net()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(frames.PREFACE)) == frames.PREFACE
        server = Server(reader, writer)
        writer.write(frames.settings(dict(settings or {})))
        made.servers.put_nowait(server)

    listening = await asyncio.start_server(connected, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    made.channel = Channel(f"{host}:{port}", "/a.B/C", time.monotonic_ns, token="secret")
    await made.channel.open(1)
    try:
        yield made
    finally:
        await made.channel.close()
        listening.close()


async def test_a_call_and_its_answer_in_pieces() -> None:
    """Padding, a priority, headers over two frames and a message cut anywhere."""
    async with net() as made:
        server = await made.servers.get()
        answer, message = made.call()
        flags, number, block = await server.next(Kind.HEADERS)
        assert flags == frames.END_HEADERS
        said = dict(hpack.Decoder().decode(block))
        assert said[":path"] == "/a.B/C"
        assert said["te"] == "trailers"
        assert said["authorization"] == "Bearer secret"
        assert await server.next(Kind.DATA) == (frames.END_STREAM, number, message)
        reply = server.encoder.encode([*REPLY, ("x-more", "y" * 40)])
        server.say(Kind.HEADERS, frames.PADDED | frames.PRIORITY, number,
                   b"\x03" + bytes(5) + reply[:10] + b"pad")  # fmt: skip
        server.say(Kind.CONTINUATION, frames.END_HEADERS, number, reply[10:])
        first = PREFIX.pack(0, 3) + b"one" + PREFIX.pack(0, 3)
        server.say(Kind.DATA, frames.PADDED, number, b"\x02" + first[:6] + b"zz")
        await server.writer.drain()
        server.say(Kind.DATA, 0, number, first[6:] + b"two")
        server.finish(number, GOOD)
        assert await answer.done == ""
        assert answer.messages == [b"one", b"two"]
        assert answer.sent == 1


async def test_equal_headers_are_decoded_anew_when_the_table_has_changed() -> None:
    """One byte means another header after each insertion: what is remembered must not be stale."""
    async with net() as made:
        server = await made.servers.get()
        reasons = []
        for words in ("first", "second", "second", "third", "first"):
            answer, _ = made.call()
            _, number, _ = await server.next(Kind.HEADERS)
            server.finish(number, [*REPLY, ("grpc-status", "8"), ("grpc-message", f"{words}%21")])
            reasons.append(await answer.done)
    assert reasons == [
        f"RESOURCE_EXHAUSTED: {words}!" for words in ("first", "second", "second", "third", "first")
    ]


def test_a_block_that_only_resizes_the_table_does_so_each_time() -> None:
    blocks = Blocks()
    small, usual = b"\x3f\xe1\x07\x88", b"\x3f\xe1\x1f\x88"  # 1024 or 4096, and :status 200
    sizes = []
    for block in (small, usual, small, small, usual):
        assert blocks.add(frames.END_HEADERS, 1, block) == ({":status": "200"}, False)
        sizes.append(blocks._decoder.header_table.maxsize)
    assert sizes == [1024, 4096, 1024, 1024, 4096]


async def test_flow_control_is_kept() -> None:
    """No more than the windows allow, then on in order as they open."""
    async with net({Setting.INITIAL_WINDOW_SIZE: 10}) as made:
        server = await made.servers.get()
        answer, message = made.call(b"x" * 95)
        _, number, _ = await server.next(Kind.HEADERS)
        flags, _, got = await server.next(Kind.DATA)
        assert (flags, len(got)) == (0, 10)
        server.say(Kind.SETTINGS, 0, 0, frames.settings({Setting.INITIAL_WINDOW_SIZE: 30})[9:])
        _, _, more = await server.next(Kind.DATA)
        assert len(more) == 20
        server.writer.write(frames.number(Kind.WINDOW_UPDATE, number, 1000))
        flags, _, rest = await server.next(Kind.DATA)
        assert flags == frames.END_STREAM
        assert got + more + rest == message
        server.finish(number, [*REPLY, *GOOD])
        assert await answer.done == ""


class Silent:
    """A stream that nobody listens to."""

    def data(self, body: bytes, at_ns: int) -> None: ...
    def headers(self, headers: Mapping[str, str]) -> None: ...
    def closed(self, reason: str, unanswered: bool) -> None: ...


async def test_what_has_been_sent_is_not_kept() -> None:
    """A prompt of megabytes must not lie in memory until its answer has come."""
    async with net() as made:
        server = await made.servers.get()
        connection = made.channel.take()
        assert connection is not None
        prompt = array.array("B", b"prompt")
        known = weakref.ref(prompt)
        connection.start(hpack.Encoder().encode([(":method", "POST")]), prompt, Silent())  # type: ignore[arg-type]
        del prompt
        assert (await server.next(Kind.DATA))[2] == b"prompt"
        assert connection.open_streams == 1
        assert known() is None


async def test_the_window_of_the_connection_is_shared() -> None:
    async with net({Setting.INITIAL_WINDOW_SIZE: 1 << 20}) as made:
        server = await made.servers.get()
        large, message = made.call(b"x" * 100_000)
        small, _ = made.call()
        sent = b""
        while len(sent) < frames.USUAL_WINDOW:
            _, first, body = await server.next(Kind.DATA)
            assert len(body) <= frames.USUAL_FRAME_BYTES
            sent += body
        assert len(sent) == frames.USUAL_WINDOW
        server.writer.write(frames.number(Kind.WINDOW_UPDATE, 0, 1 << 20))
        while len(sent) < len(message):
            sent += (await server.next(Kind.DATA))[2]
        assert sent == message
        _, second, _ = await server.next(Kind.DATA)
        for number in (first, second):
            server.finish(number, [*REPLY, *GOOD])
        assert [await large.done, await small.done] == ["", ""]


@pytest.mark.parametrize("how", ["refused", "goaway"])
async def test_what_the_server_never_saw_goes_out_again(how: str) -> None:
    async with net() as made:
        server = await made.servers.get()
        answer, _ = made.call()
        _, number, _ = await server.next(Kind.HEADERS)
        if how == "refused":
            server.writer.write(frames.number(Kind.RST_STREAM, number, frames.Code.REFUSED_STREAM))
        else:
            server.say(Kind.GOAWAY, 0, 0, bytes(8) + b"moving")
            server = await made.servers.get()
        _, number, _ = await server.next(Kind.HEADERS)
        server.finish(number, [*REPLY, *GOOD])
        assert await answer.done == ""
        assert (answer.retries, answer.sent) == (1, 2)


async def test_a_limit_of_streams_opens_further_connections() -> None:
    async with net({Setting.MAX_CONCURRENT_STREAMS: 1}) as made:
        answers = [made.call()[0] for _ in range(3)]
        for _ in answers:
            server = await made.servers.get()
            _, number, _ = await server.next(Kind.HEADERS)
            server.finish(number, [*REPLY, *GOOD])
        assert [await answer.done for answer in answers] == [""] * 3
        assert made.channel.late == 2


async def test_cancelling_resets_the_stream_and_only_that() -> None:
    async with net() as made:
        server = await made.servers.get()
        other, _ = made.call()
        cancelled, _ = made.call()
        made.last.cancel()
        _, number, body = await server.next(Kind.RST_STREAM)
        assert frames.read_number(body) == frames.Code.CANCEL
        server.headers(number, REPLY)  # on its way already
        server.message(number, b"late")
        server.headers(number - 2, REPLY)
        server.message(number - 2, b"well")
        server.finish(number - 2, GOOD)
        assert await other.done == ""
        assert other.messages == [b"well"]
        assert not cancelled.done.done()
        assert cancelled.messages == []


BROKEN = {
    "HTTP/1": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "not HTTP/2"),
    "a long frame": (HEAD.pack(0xFFFF, 0, Kind.DATA, 0, 1), "longer than it may be"),
    "a push": (frames.frame(Kind.PUSH_PROMISE, 4, 1, bytes(4)), "push"),
    "bad headers": (frames.frame(Kind.HEADERS, 5, 1, b"\xff\xff\xff\xff"), "headers"),
    "interrupted headers": (frames.frame(Kind.HEADERS, 0, 1) + frames.frame(Kind.PING, 0, 0),
                            "interrupted"),
    "nothing goes on": (frames.frame(Kind.CONTINUATION, 4, 1), "go on"),
    "too much padding": (frames.frame(Kind.DATA, frames.PADDED, 1, b"\x09ab"), "padding"),
    "half a setting": (frames.frame(Kind.SETTINGS, 0, 0, b"abc"), "SETTINGS"),
    "half a number": (frames.frame(Kind.RST_STREAM, 0, 1, b"a"), "too short"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_server_fails_its_calls_with_the_reason(name: str) -> None:
    said, reason = BROKEN[name]
    async with net() as made:
        server = await made.servers.get()
        answer, _ = made.call()
        await server.next(Kind.HEADERS)
        server.writer.write(said)
        assert reason in await answer.done


FAILURES = {
    "a lost connection": (lambda s, n: s.writer.close(), "closed the connection"),
    "a reset": (lambda s, n: s.writer.write(frames.number(Kind.RST_STREAM, n, 99)), "code 99"),
    "another status": (lambda s, n: s.finish(n, [(":status", "503")]), "HTTP 503"),
    "no status": (lambda s, n: s.finish(n, REPLY), "status missing: no reason given"),
    "compression": (lambda s, n: s.say(Kind.DATA, 0, n, PREFIX.pack(1, 0)), "compressed"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILURES)
async def test_how_a_call_fails(name: str) -> None:
    act, reason = FAILURES[name]
    async with net() as made:
        server = await made.servers.get()
        answer, _ = made.call()
        _, number, _ = await server.next(Kind.HEADERS)
        act(server, number)
        assert reason in await answer.done


async def test_a_defect_of_ours_is_called_by_its_name() -> None:
    async with net() as made:
        server = await made.servers.get()
        answer, _ = made.call()
        answer.messages = ()  # type: ignore[assignment]
        _, number, _ = await server.next(Kind.HEADERS)
        server.message(number, b"one")
        assert (await answer.done).startswith("AttributeError: ")


async def test_pings_and_settings_are_acknowledged() -> None:
    async with net() as made:
        server = await made.servers.get()
        assert (await server.next(Kind.SETTINGS))[0] == 0
        assert (await server.next(Kind.SETTINGS))[0] == frames.ACK
        server.say(Kind.PING, 0, 0, b"12345678")
        assert await server.next(Kind.PING) == (frames.ACK, 0, b"12345678")


async def test_an_address_where_nobody_speaks_http2() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    listening = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    with pytest.raises(TargetError, match="not HTTP/2"):
        await Channel(f"{host}:{port}", "/a.B/C", time.monotonic_ns).open(1)
    listening.close()


async def test_a_connection_that_nobody_waits_for_any_more_is_closed() -> None:
    accepted, hung_up = asyncio.Event(), asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(len(frames.PREFACE))
        accepted.set()
        with suppress(ConnectionError):
            await reader.read()  # to the end, or to a reset
        hung_up.set()
        writer.close()

    listening = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    host, port = listening.sockets[0].getsockname()
    channel = Channel(f"{host}:{port}", "/a.B/C", time.monotonic_ns)
    opening = asyncio.create_task(channel.open(1))
    await accepted.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    async with asyncio.timeout(60):
        await hung_up.wait()
    listening.close()
