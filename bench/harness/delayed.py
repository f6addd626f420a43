"""`tknp` whose ranks receive what other nodes send a while later, as over a longer wire.

    python delayed.py MICROSECONDS serve decode-node --pool ...

The sender adds when it sent; the receiver shows a message only once it is that old. Both read one
clock, so all ranks must be on this host. A collective over several nodes ends that much later.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tknp.cli.main import main
from tknp.layout.rank import Rank
from tknp.node import server
from tknp.transport import factory
from tknp.transport.base import Message, Scope, Traffic, Transport, Work


class _Late:
    """`work`, done `delay_s` after what it received was sent, or after it ended."""

    def __init__(self, work: Work, delay_s: float, stamps: Sequence[Tensor]) -> None:
        self._work, self._delay_s, self._stamps = work, delay_s, stamps
        self._due_s: float | None = None

    def done(self) -> bool:
        if self._due_s is None:
            if not self._work.done():
                return False
            self._due_s = self._due()
        return time.monotonic() >= self._due_s

    def wait(self) -> None:
        self._work.wait()
        if self._due_s is None:
            self._due_s = self._due()
        while (left_s := self._due_s - time.monotonic()) > 0:
            time.sleep(left_s - 1e-4 if left_s > 3e-4 else 0)

    def _due(self) -> float:
        sent = [float(stamp) for stamp in self._stamps] or [time.monotonic()]
        return max(sent) + self._delay_s


class Delayed:
    """A transport whose messages between nodes take `delay_s` longer."""

    def __init__(self, inner: Transport, delay_s: float, nodes: int) -> None:
        self._inner, self._delay_s, self._nodes = inner, delay_s, nodes
        self.rank: Rank = inner.rank

    @property
    def sent_bytes(self) -> Traffic:
        return self._inner.sent_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def post(self, sends: Sequence[Message], recvs: Sequence[Message], *, stream: int) -> Work:
        now = torch.tensor([time.monotonic()], dtype=torch.float64)
        away = list(dict.fromkeys(dst for dst, rows in sends if self._far(dst, rows)))
        stamps = {src: torch.empty_like(now) for src, rows in recvs if self._far(src, rows)}
        work = self._inner.post(
            [*sends, *((dst, now) for dst in away)], [*recvs, *stamps.items()], stream=stream
        )
        return _Late(work, self._delay_s, list(stamps.values())) if stamps else work

    def all_reduce(self, tensor: Tensor, *, stream: int, scope: Scope = "node") -> Work:
        work = self._inner.all_reduce(tensor, stream=stream, scope=scope)
        far = scope == "pool" and self._nodes > 1
        return _Late(work, self._delay_s, []) if far else work

    def _far(self, peer: Rank, rows: Tensor) -> bool:
        return peer.node != self.rank.node and rows.numel() > 0


def install(delay_s: float) -> None:
    """Let decode nodes of this process join through Delayed."""
    join = factory.join

    def joined(rank: Rank, nodes: int, tp: int, **given: Any) -> Transport:
        return Delayed(join(rank, nodes, tp, **given), delay_s, nodes)  # type: ignore[return-value]

    server.join = joined  # type: ignore[attr-defined]


if __name__ == "__main__":
    install(float(sys.argv.pop(1)) * 1e-6)
    main()
