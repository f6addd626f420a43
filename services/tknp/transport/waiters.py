"""Threads for waits that can't be polled.

A library that only offers a blocking wait still has to answer `Work.done`: somebody else waits, and
sets a flag. Threads are started when all others wait, and serve again when their wait is over. They
are daemons: a wait that its library never ends must not keep the process alive.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Waiters:
    """As many threads as there ever were waits at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = self._idle = 0

    def run(self, wait: Callable[[], None]) -> threading.Event:
        """Run `wait`, which must not raise, aside; the event is set once it has returned."""
        returned = threading.Event()

        def call() -> None:
            wait()
            returned.set()

        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._threads += 1
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
        self._calls.put(call)
        return returned

    def close(self) -> None:
        """Let the threads end, each after its wait."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            with self._lock:
                self._idle += 1
