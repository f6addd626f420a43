"""Ranks as threads of one process: what most tests and a one-process pool run on.

A message is handed over: whichever side posts second copies from the sender's buffer into the
receiver's, once, and completes both. Nothing is buffered, so an order of posts that deadlocks on
gloo or NCCL runs into the deadline here too, and a send buffer overwritten too early shows.

Lock order: the hub's lock guards channels and lost ranks; each rank's condition guards the state
of its works. They are never held together.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tknp.errors import DeadlineExceeded, InvalidValue, ProtocolError, TknpError, Unavailable
from tknp.layout.rank import Rank
from tknp.transport.base import Message, Work
from tknp.transport.point_to_point import PointToPointTransport, check_rank, describe


@dataclass(eq=False, slots=True)
class _Half:
    """One side of a message: the sender's or the receiver's."""

    peer: Rank
    tensor: Tensor
    work: _LocalWork
    sends: bool
    done: bool = False


@dataclass
class _Channel:
    """Halves of one (sender, receiver, stream) that wait for their other half; one is empty."""

    sends: deque[_Half] = field(default_factory=deque)
    recvs: deque[_Half] = field(default_factory=deque)


class LocalHub:
    """The wires of a pool of `nodes` x `tp` ranks inside one process."""

    def __init__(self, nodes: int, tp: int, timeout_s: float) -> None:
        for name, value in (("nodes", nodes), ("tp", tp)):
            if value < 1:
                raise InvalidValue(name, value, "must be at least 1")
        self._nodes = nodes
        self._tp = tp
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._channels: dict[tuple[Rank, Rank, int], _Channel] = defaultdict(_Channel)
        self._lost: dict[Rank, str] = {}
        self._changed = {Rank(n, t): threading.Condition() for n in range(nodes) for t in range(tp)}

    def transport(self, rank: Rank) -> LocalTransport:
        """The transport of `rank`; each rank takes its own once."""
        check_rank("rank", rank, self._nodes, self._tp)
        return LocalTransport(self, rank, self._nodes, self._tp, self._timeout_s)

    def _submit(self, rank: Rank, halves: Sequence[_Half], stream: int) -> None:
        """Match `halves` with those that peers have posted, else leave them to be matched."""
        matched: list[tuple[_Half, _Half]] = []
        with self._lock:
            if rank in self._lost:
                raise Unavailable(self._lost[rank])
            for half in halves:
                if half.sends:
                    channel = self._channels[rank, half.peer, stream]
                    mine, theirs = channel.sends, channel.recvs
                else:
                    channel = self._channels[half.peer, rank, stream]
                    mine, theirs = channel.recvs, channel.sends
                if theirs:
                    matched.append((half, theirs.popleft()))
                else:
                    mine.append(half)
        for half, other in matched:
            source, target = (half, other) if half.sends else (other, half)
            error = _copy(source, target)
            half.work.complete(half, error)
            other.work.complete(other, error)

    def _lose(self, rank: Rank, reason: str) -> None:
        with self._lock:
            self._lost.setdefault(rank, reason)
        for condition in self._changed.values():
            with condition:
                condition.notify_all()

    def _why_lost(self, rank: Rank) -> str | None:
        return self._lost.get(rank)


def _copy(source: _Half, target: _Half) -> TknpError | None:
    if source.tensor.nbytes != target.tensor.nbytes or source.tensor.dtype != target.tensor.dtype:
        return ProtocolError(
            f"rank {target.peer} sent {source.tensor.nbytes} bytes of {source.tensor.dtype}, "
            f"rank {source.peer} expected {target.tensor.nbytes} of {target.tensor.dtype}"
        )
    # The mode is a thread's own; buffers made under it could not be written without it.
    with torch.inference_mode():
        target.tensor.view(-1).copy_(source.tensor.view(-1))
    return None


class _LocalWork:
    """Completed half by half, by this rank's thread or its peers'."""

    def __init__(self, transport: LocalTransport, stream: int, operation: str) -> None:
        self._transport = transport
        self._stream = stream
        self._operation = operation
        self._error: TknpError | None = None
        self._deadline = 0.0
        self.halves: list[_Half] = []

    def complete(self, half: _Half, error: TknpError | None) -> None:
        with self._transport.changed:
            half.done = True
            self._error = self._error or error
            self._transport.changed.notify_all()

    def wait(self) -> None:
        with self._transport.changed:
            while (left_s := self._left_s()) > 0:
                self._transport.changed.wait(left_s)
        self._raise()

    def done(self) -> bool:
        with self._transport.changed:
            left_s = self._left_s()
        self._raise()
        return left_s <= 0

    def _left_s(self) -> float:
        """Seconds until the deadline while the exchange is under way, else 0. Finds errors."""
        if self._error is not None or all(half.done for half in self.halves):
            return 0.0
        now = time.monotonic()
        self._deadline = self._deadline or now + self._transport.timeout_s
        self._error = self._loss()
        if self._error is None and now >= self._deadline:
            self._error = DeadlineExceeded(
                f"{self._missing()} not done after {self._transport.timeout_s} s"
            )
        return self._deadline - now if self._error is None else 0.0

    def _raise(self) -> None:
        if self._error is not None:
            self._transport.abort(str(self._error))
            raise self._error

    def _loss(self) -> TknpError | None:
        """Why this exchange can never end, if a rank it lacks is gone."""
        reason = self._transport.why_lost(self._transport.rank)
        if reason is not None:
            return Unavailable(reason)
        for half in self.halves:
            reason = None if half.done else self._transport.why_lost(half.peer)
            if reason is not None:
                return Unavailable(f"{self._missing()}; rank {half.peer} is lost: {reason}")
        return None

    def _missing(self) -> str:
        left = [half for half in self.halves if not half.done]
        return describe(
            self._operation,
            self._stream,
            [half.peer for half in left if half.sends],
            [half.peer for half in left if not half.sends],
        )


class LocalTransport(PointToPointTransport):
    """Transport of one thread of a LocalHub."""

    def __init__(self, hub: LocalHub, rank: Rank, nodes: int, tp: int, timeout_s: float) -> None:
        super().__init__(rank, nodes, tp, timeout_s)
        self._hub = hub
        self.timeout_s = timeout_s
        self.changed = hub._changed[rank]

    def _start(
        self, sends: Sequence[Message], recvs: Sequence[Message], stream: int, operation: str
    ) -> Work:
        work = _LocalWork(self, stream, operation)
        work.halves = [_Half(peer, tensor, work, True) for peer, tensor in sends]
        work.halves += [_Half(peer, tensor, work, False) for peer, tensor in recvs]
        self._hub._submit(self.rank, work.halves, stream)
        return work

    def why_lost(self, rank: Rank) -> str | None:
        """Why `rank` is lost to the pool, None while it lives."""
        return self._hub._why_lost(rank)

    def abort(self, reason: str) -> None:
        self._hub._lose(self.rank, reason)

    def close(self) -> None:
        self._hub._lose(self.rank, "closed")
