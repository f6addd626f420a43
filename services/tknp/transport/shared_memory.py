"""Ranks as CPU processes of one host, over rings in shared memory.

Every rank makes one segment: its inbox, with a ring for each (peer, stream). Sending copies into
the receiver's inbox, receiving copies out of one's own; both are plain memory copies on the
calling thread, by compiled code or by Python (`lane.py`). A message that fits its ring is sent when
`post` returns; the rest of a larger one moves while this rank waits for anything on that stream.

Waiting spins, then yields the core, then sleeps in short steps, so that a rank that waits for a
whole layer of another's work doesn't take the core which does it. Every few milliseconds it looks
after its peers and its deadline.

A rank shows its own abort or close in its segment; its death shows in the segment's lock
(`segment.py`). Both are looked at while waiting only, after the rings are empty: what a rank sent
before it went arrives.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Sequence
from typing import NoReturn

from tknp.errors import DeadlineExceeded, InvalidValue, ProtocolError, TknpError, Unavailable
from tknp.layout.rank import Rank
from tknp.transport.base import Message, Transport, Work
from tknp.transport.lane import Lane, LaneFactory, PythonLane, Wire
from tknp.transport.point_to_point import DONE, PointToPointTransport, check_rank, describe
from tknp.transport.ring import LINE, PREFIX_BYTES, framing_bytes
from tknp.transport.segment import HEADER_BYTES, Segment, sweep

_MEET_S = 0.001  # between two looks for peers while connecting
_LOOK_NS = 2_000_000  # how often a waiter looks after its peers


class _Exchange:
    def __init__(
        self,
        transport: SharedMemoryTransport,
        lane: Lane,
        first: int,
        stop: int,
        stream: int,
        operation: str,
    ) -> None:
        self._transport = transport
        self._lane = lane
        self._first, self._stop = first, stop
        self._stream = stream
        self._operation = operation
        self._error: TknpError | None = None
        self._since_ns = self._looked_ns = 0

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        try:
            if not self._lane.done(self._first, self._stop):
                self._wait()
        except TknpError as error:
            self._fail(error)

    def done(self) -> bool:
        if self._error is not None:
            raise self._error
        try:
            if self._lane.done(self._first, self._stop):
                return True
            now = self._begin()
            if now >= self._looked_ns + _LOOK_NS:
                self._looked_ns = now
                self._look_after_peers(now)
        except TknpError as error:
            self._fail(error)
        return False

    def _wait(self) -> None:
        now = self._begin()
        while not self._lane.wait(self._first, self._stop, self._since_ns, now + _LOOK_NS):
            now = time.monotonic_ns()
            self._look_after_peers(now)

    def _begin(self) -> int:
        """The time, from which the deadline counts when this is the first call."""
        now = time.monotonic_ns()
        self._since_ns = self._since_ns or now
        return now

    def _fail(self, error: TknpError) -> NoReturn:
        if isinstance(error, ProtocolError):
            error = ProtocolError(f"{self._missing()}: {error}")
        self._error = error
        self._transport.abort(str(error))
        raise error

    def _look_after_peers(self, now_ns: int) -> None:
        """Raise if this exchange can't be expected to end."""
        transport = self._transport
        if transport.broken is not None:
            raise Unavailable(transport.broken)
        for peer, sends in self._lane.missing(self._first, self._stop):
            reason = transport.why_lost(peer)
            if reason is None:
                continue
            # What it sent before it went has arrived by now.
            self._lane.done(self._first, self._stop)
            if (peer, sends) in self._lane.missing(self._first, self._stop):
                raise Unavailable(f"{self._missing()}; rank {peer} is lost: {reason}")
        if now_ns - self._since_ns >= transport.timeout_s * 1e9:
            raise DeadlineExceeded(f"{self._missing()} not done after {transport.timeout_s} s")

    def _missing(self) -> str:
        left = self._lane.missing(self._first, self._stop)
        return describe(
            self._operation,
            self._stream,
            [peer for peer, sends in left if sends],
            [peer for peer, sends in left if not sends],
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
        lanes: LaneFactory,
    ) -> None:
        super().__init__(rank, nodes, tp, timeout_s)
        self.timeout_s = timeout_s
        self.broken: str | None = None
        self._segments = segments
        self._peers = peers = frozenset(segments) - {rank}

        def wire(peer: Rank, sends: bool, stream: int) -> Wire:
            reader, writer = (peer, rank) if sends else (rank, peer)
            offset = _ring_offset(reader, writer, stream, tp, streams, ring_bytes)
            memory = segments[reader].memory
            return Wire(peer, sends, memory, offset, ring_bytes, segments[peer].memory)

        own = segments[rank].memory
        self._lanes = [
            lanes(
                [wire(peer, sends, stream) for peer in sorted(peers) for sends in (True, False)],
                own,
            )
            for stream in range(streams)
        ]

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], *, stream: int) -> Work:
        # A layer takes two of these: what is usual passes with one look, the base class has the
        # rest and the errors.
        node_local = cross_node = framing = 0
        for peer, tensor in sends:
            nbytes = tensor.nbytes
            if peer not in self._peers or not tensor.is_contiguous() or not nbytes:
                return super().post(sends, recvs, stream=stream)
            if peer.node == self.rank.node:
                node_local += nbytes
            else:
                cross_node += nbytes
            framing += framing_bytes(nbytes)
        for peer, tensor in recvs:
            if peer not in self._peers or not tensor.is_contiguous() or not tensor.numel():
                return super().post(sends, recvs, stream=stream)
        work = self._exchange(sends, recvs, stream, "exchange")
        if sends:
            self.count(node_local, cross_node, framing)
        return work

    def lane(self, stream: int) -> Lane:
        """What moves the messages of `stream`, for code that drives it without `post`.

        It counts what it sends (`count`), and leaves to `under_way` what it has to wait for.
        """
        return self._lanes[stream]

    def under_way(self, first: int, stop: int, stream: int, operation: str = "exchange") -> Work:
        """The exchange of messages [first, stop) of a lane. Unavailable as of `post`."""
        if self.broken is not None:
            raise Unavailable(self.broken)
        if first == stop:
            return DONE
        return _Exchange(self, self._lanes[stream], first, stop, stream, operation)

    def _start(
        self, sends: Sequence[Message], recvs: Sequence[Message], stream: int, operation: str
    ) -> Work:
        work = self._exchange(sends, recvs, stream, operation)
        if sends:
            self.count(0, 0, sum(framing_bytes(tensor.nbytes) for _, tensor in sends))
        return work

    def _exchange(
        self, sends: Sequence[Message], recvs: Sequence[Message], stream: int, operation: str
    ) -> Work:
        if self.broken is not None:
            raise Unavailable(self.broken)
        if not 0 <= stream < len(self._lanes):
            raise InvalidValue("stream", stream, f"connected with streams={len(self._lanes)}")
        first, stop = self._lanes[stream].post(sends, recvs)
        return self.under_way(first, stop, stream, operation)

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
    lanes: LaneFactory = PythonLane,
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
        lanes: what moves the messages; ranks may differ in it.

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
        rank, nodes, tp, segments,
        timeout_s=timeout_s, streams=streams, ring_bytes=ring_bytes, lanes=lanes,
    )  # fmt: skip


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
