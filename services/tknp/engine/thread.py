"""The one thread on which a rank computes.

A daemon, unlike the threads of `concurrent.futures`: a call that never returns, in a kernel or in a
rendezvous with peers that never come, must not keep a process alive that has been told to end.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
log = logging.getLogger(__name__)


class EngineThread:
    """Runs what is submitted, one call after another, until `close`."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue `call`. Its future is cancelled if the thread closes before its turn."""
        future: Future[T] = Future()

        def run() -> None:
            if self._closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        self._calls.put(run)
        return future

    def post(self, call: Callable[[], None]) -> None:
        """Queue `call`, which tells of itself what becomes of it: cheaper than `submit`.

        It is dropped if the thread closes before its turn.
        """

        def run() -> None:
            if self._closed:
                return
            try:
                call()
            except BaseException:
                log.exception("a call on the thread %s", self._thread.name)

        self._calls.put(run)

    def close(self, wait_s: float) -> bool:
        """Cancel what has not begun; False if what has does not end within `wait_s`."""
        self._closed = True
        self._calls.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
