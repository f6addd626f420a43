"""Liveness: whether work that is pending goes on.

A process that answers its port may still hang: in a kernel, in a driver, for a message that never
comes. So liveness is not an answer, but progress: a count that goes up while anything is pending.
Looks are taken from outside the work, on a clock that is passed in.
"""

from __future__ import annotations

from collections.abc import Callable

STALLS_A_TIMEOUT = 3


class Stall:
    """`limit_s`: longest that pending work may go without progress."""

    def __init__(self, clock: Callable[[], float], limit_s: float) -> None:
        self.limit_s = limit_s
        self._clock = clock
        self._done: int | None = None
        self._since_s = 0.0

    def look(self, pending: bool, done: int) -> str:
        """Why work counts as hung; empty while it goes on. `done` grows with each piece of it."""
        now = self._clock()
        if not pending:
            self._done = None
        elif done != self._done:
            self._done, self._since_s = done, now
        elif now - self._since_s >= self.limit_s:
            return f"no progress for {now - self._since_s:.0f} s while work is pending"
        return ""
