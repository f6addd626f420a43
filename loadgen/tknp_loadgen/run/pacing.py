"""When requests are due: the schedule of an open loop, and the users of a closed one.

Deadlines are absolute and set once: a late release makes no later one late, nothing is dropped,
nothing is put off. A release happens inside the timer's callback. What is due at one moment leaves
together; what is overdue otherwise lets the event loop look at its sockets every `TOGETHER`
releases, so that a client that cannot keep up still stamps what comes back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from tknp_loadgen.run.timer import Timer
from tknp_loadgen.target.base import Clock
from tknp_loadgen.trace.format import MICRO, Trace

TOGETHER = 16
NEVER_NS = 1 << 62
Release = Callable[[int, int], None]
"""Sends a row that was due at a time of the run's clock."""


class Pacing(Protocol):
    """Releases every row of a worker once. `next_due_ns`: the next release, or NEVER_NS."""

    next_due_ns: int
    done: asyncio.Event  # nothing more will be released

    def start(self, release_ns: int) -> None:
        """The run as a whole begins at `release_ns`."""

    def ended(self, row: int) -> None:
        """A request has ended, however."""

    def stop(self) -> None:
        """Release nothing more."""


class OpenLoop:
    """Rows at their arrival times, whatever the server does."""

    def __init__(
        self, trace: Trace, rows: Sequence[int], timer: Timer, clock: Clock, release: Release
    ) -> None:
        self._rows = rows
        self._due_us = trace.arrival_us[list(rows)].tolist()
        self._timer, self._clock, self._release = timer, clock, release
        self._next = self._release_ns = 0
        self.next_due_ns = NEVER_NS
        self.done = asyncio.Event()

    def start(self, release_ns: int) -> None:
        self._release_ns = release_ns
        self._wait()

    def ended(self, row: int) -> None: ...

    def stop(self) -> None:
        self._next = len(self._rows)
        self._wait()

    def _wait(self) -> None:
        if self._next < len(self._rows):
            self.next_due_ns = self._release_ns + self._due_us[self._next] * 1000
            self._timer.at(self.next_due_ns, self._due)
        else:
            self.next_due_ns = NEVER_NS
            self.done.set()

    def _due(self) -> None:
        released, due_ns = 0, self.next_due_ns
        while self.next_due_ns <= self._clock() and not self.done.is_set():
            if released >= TOGETHER and self.next_due_ns != due_ns:
                break
            due_ns = self.next_due_ns
            row = self._rows[self._next]
            self._next += 1
            self.next_due_ns = (
                self._release_ns + self._due_us[self._next] * 1000
                if self._next < len(self._rows) else NEVER_NS
            )  # fmt: skip
            self._release(row, due_ns)
            released += 1
        if not self.done.is_set():
            self._wait()


class ClosedLoop:
    """Users who think, ask, wait for the answer and begin again."""

    def __init__(
        self, trace: Trace, rows: Sequence[int], timer: Timer, clock: Clock, release: Release
    ) -> None:
        self._trace, self._timer, self._clock, self._release = trace, timer, clock, release
        self._users: dict[int, deque[int]] = {}
        for row in rows:
            self._users.setdefault(trace.extra(row)["user"], deque()).append(row)
        self._left = len(rows)
        self.next_due_ns = NEVER_NS  # encoding ahead needs no idle time: users wait for answers
        self.done = asyncio.Event()

    def start(self, release_ns: int) -> None:
        for user in self._users:
            self._think(user, release_ns)
        if not self._left:
            self.done.set()

    def ended(self, row: int) -> None:
        self._think(self._trace.extra(row)["user"], self._clock())

    def stop(self) -> None:
        self._users.clear()
        self.done.set()

    def _think(self, user: int, since_ns: int) -> None:
        rows = self._users.get(user)
        if rows:
            row = rows.popleft()
            due_ns = since_ns + round(self._trace.extra(row)["think_s"] * MICRO) * 1000
            self._timer.at(due_ns, partial(self._due, row, due_ns))

    def _due(self, row: int, due_ns: int) -> None:
        if self.done.is_set():
            return
        self._left -= 1
        if not self._left:
            self.done.set()
        self._release(row, due_ns)
