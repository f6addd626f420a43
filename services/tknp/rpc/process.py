"""The life of a service process: start, run until a signal or a failure, stop.

The first SIGTERM or SIGINT lets a service that can drain finish its open work; a second one stops
it at once, as does its failure meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from tknp.errors import TknpError


class Service(Protocol):
    """What a process runs."""

    async def start(self) -> None:
        """Open the port and begin to work; what takes long goes on behind it."""

    async def failed(self) -> str:
        """Wait until the service can't go on; return why."""

    async def stop(self) -> None:
        """End calls, threads and connections."""


@runtime_checkable
class Drains(Protocol):
    """A service that has work to finish before it stops."""

    async def drain(self) -> None:
        """Take no new work; return when open work has ended, or its time is up."""


class ServiceFailed(TknpError):
    """A service process ended by itself; the message says why."""


class _Signals:
    """Counts SIGTERM and SIGINT of this process."""

    def __init__(self) -> None:
        self._come: asyncio.Queue[None] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._come.put_nowait, None)

    async def next(self) -> None:
        await self._come.get()


async def _first(failure: asyncio.Task[str], *waits: Coroutine[Any, Any, None]) -> None:
    """Wait until one of `waits` is done, and cancel the others; raises ServiceFailed on failure."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait([failure, *tasks], return_when=asyncio.FIRST_COMPLETED)
        if failure in done:
            raise ServiceFailed(failure.result())
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _run(make: Callable[[], Service]) -> None:
    signals = _Signals()
    service = make()
    failure = asyncio.create_task(service.failed())
    try:
        await service.start()
        await _first(failure, signals.next())
        if isinstance(service, Drains):
            await _first(failure, signals.next(), service.drain())
    finally:
        failure.cancel()
        await service.stop()


def run(make: Callable[[], Service]) -> None:
    """Run the service that `make` builds (on the event loop) until SIGTERM or SIGINT.

    Raises ServiceFailed if it ends by itself, and whatever `start` raises.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_run(make))


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed, which spends less on each message of a step; else asyncio's.

    On a host whose cores all compute, what the loop spends is taken from the computing threads.
    """
    with suppress(ImportError):
        loop: asyncio.AbstractEventLoop = import_module("uvloop").new_event_loop()
        return loop
    return asyncio.new_event_loop()
