"""The thread that posts NIXL writes of one prefill rank and watches them.

    compute thread --submit(Write)--> queue --> [worker] post, at most ACTIVE at a time
    event loop     --call(fn)-------> queue --> [worker] run between posts
                                                [worker] poll what is active; on_end(error | None)

All calls of the sender's agent come from this thread. It sleeps while nothing is active. A posted
write can't be recalled: `cancelled` is asked just before posting, and what has been posted is
watched until NIXL reports its end.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from tknp.transfer.nixl_agent import NixlAgent

ACTIVE = 32
_POLL_S = 0.0002
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Write:
    """One posting. Every callback runs on the worker thread; `on_end` exactly once.

    `post` returns the agent's handle. `cancelled`: drop it instead. `on_start`: it waits for its
    turn from now on. `on_end`: None or what failed.
    """

    post: Callable[[], int]
    cancelled: Callable[[], bool]
    on_start: Callable[[], None]
    on_end: Callable[[Exception | None], None]


class NixlWorker:
    """Runs from construction until `close`."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._queue: queue.SimpleQueue[Write | Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: deque[Write] = deque()
        self._active: deque[tuple[int, Write]] = deque()
        self._thread = threading.Thread(target=self._run, name="tknp-nixl", daemon=True)
        self._thread.start()

    def submit(self, write: Write) -> None:
        """Post `write` after those submitted before it."""
        self._queue.put(write)

    def call(self, function: Callable[[], _T]) -> Future[_T]:
        """Run `function` on the worker thread."""
        future: Future[_T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._queue.put(run)
        return future

    def close(self, timeout_s: float) -> bool:
        """End the thread once nothing is active; False if something still is after `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        closing = False
        while not (closing and not self._active and not self._waiting):
            try:
                item = self._queue.get(timeout=_POLL_S if self._active else None)
            except queue.Empty:
                item = _idle
            if item is None:
                closing = True
            elif isinstance(item, Write):
                item.on_start()
                self._waiting.append(item)
            else:
                item()
            self._poll()
            self._post()

    def _post(self) -> None:
        while self._waiting and len(self._active) < ACTIVE:
            write = self._waiting.popleft()
            if write.cancelled():
                write.on_end(None)
                continue
            try:
                self._active.append((write.post(), write))
            except Exception as error:
                write.on_end(error)

    def _poll(self) -> None:
        for _ in range(len(self._active)):
            handle, write = self._active.popleft()
            failure: Exception | None = None
            try:
                state: Any = self._agent.state(handle)
            except Exception as error:
                state, failure = "failed", error
            if state == "running":
                self._active.append((handle, write))
                continue
            if state == "failed" and failure is None:
                failure = ConnectionError("NIXL reports a failed write")
            try:
                self._agent.release(handle)
            except Exception as error:
                _log.warning("a NIXL handle could not be released: %s", error)
            write.on_end(failure)


def _idle() -> None:
    """Stands for a poll without a new item."""
