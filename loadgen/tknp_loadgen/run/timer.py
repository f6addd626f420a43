"""Waking up on time.

asyncio's own timers are late by up to a millisecond, because epoll counts milliseconds. A timerfd
wakes the loop within microseconds of an absolute monotonic time, and calls what is due in the same
turn: no future, no task in between. What is left of the way from the kernel's timer to Python is
hidden by waking `EARLY_NS` earlier and looking at the clock until the time has come. Where there is
no timerfd (other systems than Linux) the last millisecond is waited out by polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC, _ABSOLUTE, _FLAGS = 1, 1, os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_NANO = 1_000_000_000
_COARSE_NS = 1_500_000
EARLY_NS = 80_000  # how much too early a timerfd is set: what waking up takes


class Timer(Protocol):
    """Calls back at absolute times of the clock that goes with it."""

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        """Call `callback` once, from the event loop, at `deadline_ns` or as soon as it has passed.

        Never from within `at`. There is no cancelling: a callback looks whether it is still wanted.
        """

    def close(self) -> None: ...


class _Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class KernelTimer:
    """Many callbacks on one timerfd; for `time.monotonic_ns`. Belongs to one event loop."""

    def __init__(self, early_ns: int = EARLY_NS) -> None:
        self._early_ns = early_ns
        self._library = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._library.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)
        self._waiting: list[tuple[int, int, Callable[[], None]]] = []
        self._number = 0
        self._spec = _Spec(0, 0, 0, 0)
        self._spec_at = ctypes.byref(self._spec)
        self._set_for = 0  # the deadline that the timerfd is set for; 0: none

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._waiting, (deadline_ns, self._number, callback))
        self._set()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _set(self) -> None:
        first_ns = self._waiting[0][0] if self._waiting else 0
        if first_ns == self._set_for:
            return
        self._set_for = first_ns
        at_ns = max(first_ns - self._early_ns, 1) if first_ns else 0  # 0 disarms
        self._spec.at_s, self._spec.at_ns = divmod(at_ns, _NANO)
        if self._library.timerfd_settime(self._fd, _ABSOLUTE, self._spec_at, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set anew since it expired
            os.read(self._fd, 8)
        clock, waiting = time.monotonic_ns, self._waiting
        if waiting and waiting[0][0] - clock() <= self._early_ns:
            first_ns = waiting[0][0]
            while clock() < first_ns:
                pass
        due = []
        now_ns = clock()
        while waiting and waiting[0][0] <= now_ns:
            due.append(heapq.heappop(waiting)[2])
        for callback in due:
            callback()
        self._set()


class PollingTimer:
    """The portable one."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        left_ns = deadline_ns - time.monotonic_ns()
        if left_ns <= 0:
            self._loop.call_soon(callback)
        elif left_ns > _COARSE_NS:
            self._loop.call_later((left_ns - _COARSE_NS) / _NANO, self.at, deadline_ns, callback)
        else:
            self._loop.call_soon(self.at, deadline_ns, callback)

    def close(self) -> None: ...


def make_timer() -> Timer:
    """The best timer here; in a running event loop."""
    return KernelTimer() if sys.platform == "linux" else PollingTimer()
