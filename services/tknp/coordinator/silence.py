"""Processes that have stopped answering.

A process whose step stream is open is missed by the stream within seconds. Others are asked only:
prefill, the TP ranks behind a node's first, and all while a pool starts. A process counts as silent
when it has answered before, and then neither at several asks in a row nor for a while.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tknp.coordinator.startup import Peer
from tknp.v1.common_pb2 import Phase, Progress

ASKS = 4
SILENT_S = 7.0


class Silence:
    """Looks at peers after each ask."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._missed: dict[str, tuple[int, float]] = {}  # address -> asks, time of the first

    def look(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those of `peers` that are silent; their progress says so until they answer again."""
        now = self._clock()
        silent = []
        for peer in peers:
            if not peer.lost or (peer.root, peer.owner, peer.prefill) == (None, None, None):
                self._missed.pop(peer.address, None)
                continue
            asks, since_s = self._missed.get(peer.address, (0, now))
            self._missed[peer.address] = asks + 1, since_s
            if asks + 1 >= ASKS and now - since_s >= SILENT_S:
                reason = f"has not answered for {now - since_s:.0f} s: {peer.lost}"
                peer.progress = Progress(phase=Phase.PHASE_FAILED, error=reason)
                silent.append(peer)
        return silent
