"""Ranks on CPUs of any hosts, over TCP by gloo.

One process group object a transport, built from the epoch's store without torch's process-wide
default group: epochs follow each other in one process, and closing one leaves nothing behind.

What gloo does and this file hides:

- Messages match by (peer, tag). The tag holds the stream and the size: a message of another size
  than its receiver expects, which gloo would either accept in part or answer by ending the
  process, stays unmatched and ends in the deadline.
- A second wait on one of its works may block for ever: each is waited for once.
- Its messages can't be polled: `done` has a thread wait for them.
- Its abort doesn't wake waiters. A receive that times out does: it closes all connections of the
  group, so waiters here and at the peers return at once. `abort` provokes one.
- A dead peer's connections close within milliseconds; a frozen one shows only at the deadline.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo, Store  # type: ignore[attr-defined]
from torch.distributed import Work as GlooWork

from tknp.errors import DeadlineExceeded, InvalidValue, Unavailable
from tknp.layout.rank import Rank
from tknp.transport.base import Message, Work
from tknp.transport.point_to_point import PointToPointTransport, describe
from tknp.transport.waiters import Waiters

_SIZE_BITS = 24
_STREAMS = 64  # tags are 31 bits; the streams beyond belong to this file
_ABORT_TAG = _STREAMS << _SIZE_BITS


class _GlooExchange:
    """The works of one grouped exchange, receives first."""

    def __init__(
        self,
        transport: GlooTransport,
        works: list[tuple[GlooWork, Rank, bool]],
        stream: int,
        operation: str,
    ) -> None:
        self._transport = transport
        self._works = works
        self._stream = stream
        self._operation = operation
        self._error: DeadlineExceeded | Unavailable | None = None
        self._aside: threading.Event | None = None

    def wait(self) -> None:
        if self._aside is not None:
            self._aside.wait()
        else:
            self._wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        if self._aside is None and self._works and self._error is None:
            self._aside = self._transport.waiters.run(self._wait)
        if self._aside is not None and not self._aside.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _wait(self) -> None:
        """Wait for each work once; what fails is kept in `_error`."""
        if not self._works or self._error is not None:
            return
        deadline = time.monotonic() + self._transport.timeout_s
        for work, peer, sends in self._works:
            try:
                left_ms = (deadline - time.monotonic()) * 1000
                # Whole milliseconds, as gloo counts: cut off, it would give up before the deadline.
                work.wait(timedelta(milliseconds=max(math.ceil(left_ms), 1)))
            except RuntimeError as error:
                self._error = self._explain(peer, sends, deadline)
                self._error.__cause__ = error
                self._transport.abort(str(self._error))
                return
        self._works = []

    def _explain(self, peer: Rank, sends: bool, deadline: float) -> DeadlineExceeded | Unavailable:
        if self._transport.broken is not None:
            return Unavailable(self._transport.broken)
        missing = describe(
            self._operation, self._stream, [peer] if sends else [], [] if sends else [peer]
        )
        if time.monotonic() >= deadline:
            return DeadlineExceeded(
                f"{missing} not done after {self._transport.timeout_s} s: the peer is silent or "
                "expects another size"
            )
        return Unavailable(f"{missing}; rank {peer} is lost: its connection closed")


class GlooTransport(PointToPointTransport):
    """Transport over one gloo process group of all ranks.

    Args:
        interface: network interface that peers reach this rank at; None leaves the choice to
            gloo (GLOO_SOCKET_IFNAME, else the address of the host's name).
        rendezvous_timeout_s: allowed for connecting to all peers.
    """

    def __init__(
        self,
        rank: Rank,
        nodes: int,
        tp: int,
        *,
        store: Store,
        timeout_s: float,
        rendezvous_timeout_s: float,
        interface: str | None,
    ) -> None:
        super().__init__(rank, nodes, tp, timeout_s)
        self.timeout_s = timeout_s
        self.broken: str | None = None
        self.waiters = Waiters(f"gloo-{rank.node}-{rank.t}")
        self._abort_lock = threading.Lock()
        # The typed stub lacks options and the messages of a group: Any.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = timedelta(seconds=rendezvous_timeout_s)
        options._threads = 1
        options._devices = [
            gloo.create_device(interface=interface) if interface else gloo.create_default_device()
        ]
        try:
            self._group = gloo(store, rank.index(tp), nodes * tp, options)
        except RuntimeError as error:
            raise Unavailable(
                f"rank {rank} can't connect to its peers over interface {interface or 'default'}: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def _start(
        self, sends: Sequence[Message], recvs: Sequence[Message], stream: int, operation: str
    ) -> Work:
        if not 0 <= stream < _STREAMS:
            raise InvalidValue("stream", stream, f"gloo carries streams 0 to {_STREAMS - 1}")
        if self.broken is not None:
            raise Unavailable(self.broken)
        works = []
        try:
            for peer, tensor in recvs:
                tag = _tag(stream, tensor)
                works.append((self._group.recv([tensor], peer.index(self._tp), tag), peer, False))
            for peer, tensor in sends:
                tag = _tag(stream, tensor)
                works.append((self._group.send([tensor], peer.index(self._tp), tag), peer, True))
        except RuntimeError as error:
            if self.broken is None:
                self.abort(f"{operation} on stream {stream}: rank {peer} is lost")
            raise Unavailable(self.broken or "") from error
        return _GlooExchange(self, works, stream, operation)

    def abort(self, reason: str) -> None:
        with self._abort_lock:
            if self.broken is not None:
                return
            self.broken = reason
        if self._nodes * self._tp == 1:
            return
        someone = (self.rank.index(self._tp) + 1) % (self._nodes * self._tp)
        try:
            provoked = self._group.recv([torch.empty(1)], someone, _ABORT_TAG)
            provoked.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return

    def close(self) -> None:
        self.abort("closed")
        self.waiters.close()


def _tag(stream: int, tensor: torch.Tensor) -> int:
    return stream << _SIZE_BITS | tensor.nbytes & (1 << _SIZE_BITS) - 1
