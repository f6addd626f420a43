"""Waking up on time.

asyncio's own timers are late by up to a millisecond, because epoll counts milliseconds. A timerfd
wakes the loop within microseconds of an absolute monotonic time. Where there is none (other systems
than Linux) the last millisecond is waited out by polling.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import os
import sys
import time
from typing import Protocol

_CLOCK_MONOTONIC, _ABSOLUTE, _FLAGS = 1, 1, os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_NANO = 1_000_000_000
_COARSE_NS = 1_500_000


class Timer(Protocol):
    """Waits for absolute times of the clock that goes with it."""

    async def until(self, deadline_ns: int) -> None:
        """Return at `deadline_ns`, or at once where it has passed."""

    def close(self) -> None: ...


class _Spec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "at_s", "at_ns")]


class KernelTimer:
    """Many waiters on one timerfd; for `time.monotonic_ns`. Belongs to one event loop."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._library.timerfd_create(_CLOCK_MONOTONIC, _FLAGS)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._expired)
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._number = 0

    async def until(self, deadline_ns: int) -> None:
        if deadline_ns <= time.monotonic_ns():
            return
        future = self._loop.create_future()
        self._number += 1
        heapq.heappush(self._waiting, (deadline_ns, self._number, future))
        if self._waiting[0][2] is future:
            self._set(deadline_ns)
        await future

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _set(self, at_ns: int) -> None:
        spec = _Spec(0, 0, at_ns // _NANO, at_ns % _NANO)
        if self._library.timerfd_settime(self._fd, _ABSOLUTE, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):  # set anew since it expired
            os.read(self._fd, 8)
        now = time.monotonic_ns()
        while self._waiting and self._waiting[0][0] <= now:
            future = heapq.heappop(self._waiting)[2]
            if not future.done():
                future.set_result(None)
        if self._waiting:
            self._set(self._waiting[0][0])


class PollingTimer:
    """The portable one."""

    async def until(self, deadline_ns: int) -> None:
        while (left_ns := deadline_ns - time.monotonic_ns()) > 0:  # noqa: ASYNC110  # a clock
            await asyncio.sleep(max(0, left_ns - _COARSE_NS) / _NANO)

    def close(self) -> None: ...


def make_timer() -> Timer:
    """The best timer here; in a running event loop."""
    return KernelTimer() if sys.platform == "linux" else PollingTimer()
