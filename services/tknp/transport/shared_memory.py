"""Ranks as CPU processes of one host, over rings in shared memory.

Every rank makes one segment: its inbox, with a ring for each (peer, stream). Sending copies into
the receiver's inbox, receiving copies out of one's own; both are plain memory copies on the
calling thread. A message that fits its ring is sent when `post` returns; the rest of a larger one
moves while this rank waits for anything on that stream.

Waiting spins, then yields the core, then sleeps in short steps, so that a rank that waits for a
whole layer of another's work doesn't take the core which does it.

A rank shows its own abort or close in its segment; its death shows in the segment's lock
(`segment.py`). Both are looked at while waiting only, after the rings are empty: what a rank sent
before it went arrives.
"""

from __future__ import annotations

import ctypes
import platform
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NoReturn

from tknp.errors import DeadlineExceeded, InvalidValue, ProtocolError, TknpError, Unavailable
from tknp.layout.rank import Rank
from tknp.transport.base import Message, Transport, Work
from tknp.transport.point_to_point import PointToPointTransport, check_rank, describe
from tknp.transport.ring import LINE, PREFIX_BYTES, Part, Ring
from tknp.transport.segment import HEADER_BYTES, Segment, sweep

_SPINS = 100  # about 50 us of looking without leaving the core
_YIELD_S = 0.002  # then this long of looking and yielding
_SLEEP_S = 0.000_05  # then sleeps; the kernel makes it about 0.1 ms
# Called so, it lets other threads of this process have the interpreter too; os.sched_yield doesn't.
_yield_core = ctypes.CDLL(None).sched_yield
_MEET_S = 0.001  # between two looks for peers while connecting
_LOOK_S = 0.002  # how often a waiter looks after its peers


class _Channel:
    """One direction between this rank and a peer on a stream, with its messages under way."""

    __slots__ = ("move", "peer", "queue", "sends")

    def __init__(self, peer: Rank, sends: bool, move: Callable[[Part], bool]) -> None:
        self.peer = peer
        self.sends = sends
        self.move = move
        self.queue: deque[Part] = deque()


class _Lane:
    """The channels of one stream; only that stream's thread touches it."""

    def __init__(self, outgoing: dict[Rank, _Channel], incoming: dict[Rank, _Channel]) -> None:
        self.outgoing = outgoing
        self.incoming = incoming
        self.busy: list[_Channel] = []  # those whose queue is not empty

    def enqueue(self, channel: _Channel, part: Part) -> None:
        if not channel.queue:
            self.busy.append(channel)
        channel.queue.append(part)

    def progress(self) -> None:
        """Move what can be moved now, on every channel: a peer may need it to serve another."""
        for channel in self.busy:
            queue = channel.queue
            while queue and channel.move(queue[0]):
                queue.popleft()
        self.busy = [channel for channel in self.busy if channel.queue]


class _Exchange:
    def __init__(
        self,
        transport: SharedMemoryTransport,
        lane: _Lane,
        parts: list[tuple[_Channel, Part]],
        stream: int,
        operation: str,
    ) -> None:
        self._transport = transport
        self._lane = lane
        self._parts = parts
        self._stream = stream
        self._operation = operation
        self._error: TknpError | None = None
        self._asked = self._looked = 0.0

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        if not self._parts:
            return
        try:
            self._wait()
        except TknpError as error:
            self._fail(error)

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        if not self._parts:
            return True
        try:
            self._move()
            if self._parts:
                self._look_by_turns()
        except TknpError as error:
            self._fail(error)
        return not self._parts

    def _fail(self, error: TknpError) -> NoReturn:
        self._error = error
        self._transport.abort(str(error))
        raise error

    def _look_by_turns(self) -> None:
        """`_look_after_peers`, but not at every call of `done`."""
        now = time.monotonic()
        self._asked = self._asked or now
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._look_after_peers(now - self._asked)

    def _move(self) -> None:
        try:
            self._lane.progress()
        except ProtocolError as error:
            raise ProtocolError(f"{self._missing()}: {error}") from error
        self._parts = [item for item in self._parts if not item[1].done]

    def _wait(self) -> None:
        looks = 0
        start = looked = 0.0
        while self._parts:
            self._move()
            looks += 1
            if looks < _SPINS or not self._parts:
                continue
            now = time.monotonic()
            start = start or now
            if now - looked >= _LOOK_S:
                looked = now
                self._look_after_peers(now - start)
            if now - start < _YIELD_S:
                _yield_core()
            else:
                time.sleep(_SLEEP_S)

    def _look_after_peers(self, waited_s: float) -> None:
        """Raise if this exchange can't be expected to end."""
        transport = self._transport
        if transport.broken is not None:
            raise Unavailable(transport.broken)
        for channel, part in self._parts:
            reason = transport.why_lost(channel.peer)
            if reason is None:
                continue
            self._lane.progress()
            if not part.done:
                raise Unavailable(f"{self._missing()}; rank {channel.peer} is lost: {reason}")
        if waited_s >= transport.timeout_s:
            raise DeadlineExceeded(f"{self._missing()} not done after {transport.timeout_s} s")

    def _missing(self) -> str:
        left = [channel for channel, part in self._parts if not part.done]
        return describe(
            self._operation,
            self._stream,
            [channel.peer for channel in left if channel.sends],
            [channel.peer for channel in left if not channel.sends],
        )


class SharedMemoryTransport(PointToPointTransport):
    """Transport over the segments of all ranks, this rank's own among them."""

    def __init__(
        self,
        rank: Rank,
        nodes: int,
        tp: int,
        segments: dict[Rank, Segment],
        *,
        timeout_s: float,
        streams: int,
        ring_bytes: int,
    ) -> None:
        super().__init__(rank, nodes, tp, timeout_s)
        self.timeout_s = timeout_s
        self.broken: str | None = None
        self._segments = segments
        peers = [peer for peer in segments if peer != rank]

        def ring(reader: Rank, writer: Rank, stream: int) -> Ring:
            offset = _ring_offset(reader, writer, stream, tp, streams, ring_bytes)
            return Ring(segments[reader].memory, offset, ring_bytes)

        self._lanes = [
            _Lane(
                {p: _Channel(p, True, ring(p, rank, stream).push) for p in peers},
                {p: _Channel(p, False, ring(rank, p, stream).pull) for p in peers},
            )
            for stream in range(streams)
        ]

    def _start(
        self, sends: Sequence[Message], recvs: Sequence[Message], stream: int, operation: str
    ) -> Work:
        if self.broken is not None:
            raise Unavailable(self.broken)
        if not 0 <= stream < len(self._lanes):
            raise InvalidValue("stream", stream, f"connected with streams={len(self._lanes)}")
        lane = self._lanes[stream]
        parts = []
        for peer, tensor in sends:
            channel, part = lane.outgoing[peer], Part(tensor)
            if channel.queue or not channel.move(part):
                lane.enqueue(channel, part)
                parts.append((channel, part))
        for peer, tensor in recvs:
            channel, part = lane.incoming[peer], Part(tensor)
            lane.enqueue(channel, part)
            parts.append((channel, part))
        return _Exchange(self, lane, parts, stream, operation)

    def why_lost(self, peer: Rank) -> str | None:
        """Why `peer` takes no part any more; None while it does."""
        return self._segments[peer].why_lost()

    def abort(self, reason: str) -> None:
        if self.broken is None:
            self.broken = reason
            self._segments[self.rank].set_lost(reason)

    def close(self) -> None:
        self.abort("closed")
        self._segments[self.rank].unlink()
        for segment in self._segments.values():
            segment.close()


def connect(
    rank: Rank,
    nodes: int,
    tp: int,
    *,
    pool: str,
    epoch: int,
    timeout_s: float,
    rendezvous_timeout_s: float = 300.0,
    streams: int = 2,
    ring_bytes: int = 512 * 1024,
) -> Transport:
    """Join the pool of `epoch` and return once every rank of it has.

    Args:
        pool: random identity that the launcher gave all ranks, letters, digits and dashes.
        epoch: never used before by this pool.
        timeout_s: allowed for each exchange.
        rendezvous_timeout_s: allowed for all ranks to come; they load weights at their own speed.
        streams: streams 0 to `streams` - 1 exist, the same number at every rank.
        ring_bytes: memory for each ordered pair of ranks and stream, a multiple of 64, the same at
            every rank. The segment of this rank takes (N T - 1) streams ring_bytes in all.

    Raises:
        DeadlineExceeded: names the ranks that did not come.
        InvalidValue: this rank of this epoch is running already; see its arguments.
        CapacityError: /dev/shm has no room for the segment.
    """
    check_rank("rank", rank, nodes, tp)
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", pool):
        raise InvalidValue("pool", pool, "takes 1 to 64 letters, digits and dashes")
    if ring_bytes < 2 * LINE or ring_bytes % LINE:
        raise InvalidValue("ring_bytes", ring_bytes, f"must be a multiple of {LINE} from 128 on")
    if streams < 1:
        raise InvalidValue("streams", streams, "must be at least 1")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise InvalidValue(
            "transport", "shared memory",
            f"needs Linux on x86-64, not {platform.system()} on {platform.machine()}; use gloo",
        )  # fmt: skip
    sweep()
    size = (nodes * tp - 1) * streams * (PREFIX_BYTES + ring_bytes)
    names = {
        peer: f"{pool}-{epoch}-{peer.index(tp)}"
        for peer in (Rank.from_index(i, tp) for i in range(nodes * tp))
    }
    segments = {rank: Segment.create(names[rank], size)}
    try:
        _meet(rank, segments, names, size, rendezvous_timeout_s)
    except TknpError:
        for segment in segments.values():
            segment.close()
        raise
    finally:
        segments[rank].unlink()
    return SharedMemoryTransport(
        rank, nodes, tp, segments, timeout_s=timeout_s, streams=streams, ring_bytes=ring_bytes
    )


def _meet(
    rank: Rank, segments: dict[Rank, Segment], names: dict[Rank, str], size: int, timeout_s: float
) -> None:
    """Complete `segments` by those of all peers, and return when all ranks have done so."""
    deadline = time.monotonic() + timeout_s
    while True:
        for peer in names.keys() - segments.keys():
            found = Segment.attach(names[peer], size)
            if found is not None:
                segments[peer] = found
        if len(segments) == len(names):
            segments[rank].set_attached()
        absent = [p for p in names if p not in segments]
        absent = absent or [p for p in names if not segments[p].attached]
        if not absent:
            return
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(
                f"shared memory {names[rank]}: no sign of ranks {', '.join(map(str, absent))} "
                f"after {timeout_s} s"
            )
        time.sleep(_MEET_S)


def _ring_offset(
    reader: Rank, writer: Rank, stream: int, tp: int, streams: int, ring_bytes: int
) -> int:
    """Where the ring from `writer` lies in the memory of `reader`, which has none from itself."""
    column = writer.index(tp) - (writer > reader)
    return HEADER_BYTES + (column * streams + stream) * (PREFIX_BYTES + ring_bytes)
