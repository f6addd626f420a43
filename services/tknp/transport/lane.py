"""The messages of one stream between this rank and its peers, over rings.

    post --> [message, message, ...] --progress--> done, in order on each wire

A lane is used by its stream's thread alone. Messages are numbered as they are posted. What fits its
ring is sent at once; the rest moves whenever the lane is asked about any message, on every wire: a
peer may need it to serve another.

`PythonLane` is the twin of `kernels.mailbox.NativeLane`, for machines without a compiler.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from tknp.errors import ProtocolError
from tknp.layout.rank import Rank
from tknp.transport.base import Message
from tknp.transport.ring import Part, Ring

_YIELD_NS = 2_000_000  # a waiter looks and yields the core, as the peer may share it, this long
_SLEEP_S = 0.000_05  # then sleeps; the kernel makes it about 0.1 ms
# Called so, it lets other threads of this process have the interpreter too; os.sched_yield doesn't.
_yield_core = ctypes.CDLL(None).sched_yield


@dataclass(frozen=True)
class Wire:
    """One direction between this rank and `peer`: the ring at `offset` of `memory`.

    `peer_memory`: the peer's segment, which shows when it takes no part any more.
    """

    peer: Rank
    sends: bool
    memory: mmap.mmap
    offset: int
    capacity: int
    peer_memory: mmap.mmap


class Lane(Protocol):
    """See the module; messages are named by the numbers [first, stop) that `post` returned."""

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> tuple[int, int]:
        """Take messages of contiguous tensors, whose memory the lane keeps alive until done.

        What fits its ring is sent when it returns, and may have no number. Never raises for what
        arrived.
        """

    def done(self, first: int, stop: int) -> bool:
        """Move what can be moved without waiting; whether these messages are through.

        Raises:
            ProtocolError: what arrived, for any message, is not of its size and dtype.
        """

    def wait(self, first: int, stop: int, since_ns: int, until_ns: int) -> bool:
        """`done`, again and again until it is true or the monotonic clock shows `until_ns`.

        It may return early when this rank or a peer is lost. The longer ago the wait began
        (`since_ns`), the less it takes of the core, which the peer may need.
        """

    def missing(self, first: int, stop: int) -> list[tuple[Rank, bool]]:
        """Peer, and whether it is sent to, of each of these messages that is not through."""


LaneFactory = Callable[[Sequence[Wire], mmap.mmap], Lane]
"""Makes a lane of wires and of this rank's own segment."""


class PythonLane:
    def __init__(self, wires: Sequence[Wire], own_memory: mmap.mmap) -> None:
        rings = {(w.peer, w.sends): Ring(w.memory, w.offset, w.capacity) for w in wires}
        self._moves = {(p, s): ring.push if s else ring.pull for (p, s), ring in rings.items()}
        self._pending: dict[int, tuple[tuple[Rank, bool], Part]] = {}
        self._next = 0

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> tuple[int, int]:
        first = self._next
        for messages, sending in ((sends, True), (recvs, False)):
            for peer, tensor in messages:
                self._pending[self._next] = (peer, sending), Part(tensor)
                self._next += 1
        if sends:
            with suppress(ProtocolError):  # of a message that is received: who waits for it is told
                self._progress()
        return first, self._next

    def done(self, first: int, stop: int) -> bool:
        self._progress()
        return not any(number in self._pending for number in range(first, stop))

    def wait(self, first: int, stop: int, since_ns: int, until_ns: int) -> bool:
        if self.done(first, stop):
            return True
        while (now := time.monotonic_ns()) < until_ns:
            if now - since_ns < _YIELD_NS:
                _yield_core()
            else:
                time.sleep(_SLEEP_S)
            if self.done(first, stop):
                return True
        return False

    def missing(self, first: int, stop: int) -> list[tuple[Rank, bool]]:
        return [self._pending[n][0] for n in range(first, stop) if n in self._pending]

    def _progress(self) -> None:
        blocked = set()
        for number, (wire, part) in list(self._pending.items()):
            if wire in blocked:
                continue
            if self._moves[wire](part):
                del self._pending[number]
            else:
                blocked.add(wire)
