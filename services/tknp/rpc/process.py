"""The life of a service process: start, run until a signal or a failure, stop."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any, Protocol

from tknp.errors import TknpError


class Service(Protocol):
    """What a process runs."""

    async def start(self) -> None:
        """Open the port and begin to work; what takes long goes on behind it."""

    async def failed(self) -> str:
        """Wait until the service can't go on; return why."""

    async def stop(self) -> None:
        """End calls, threads and connections."""


class ServiceFailed(TknpError):
    """A service process ended by itself; the message says why."""


async def _run(make: Callable[[], Service]) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    service = make()
    waiters: list[asyncio.Task[Any]] = []
    try:
        await service.start()
        waiters = [asyncio.create_task(stopped.wait()), asyncio.create_task(service.failed())]
        done, _ = await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
        if waiters[1] in done:
            raise ServiceFailed(waiters[1].result())
    finally:
        for waiter in waiters:
            waiter.cancel()
        await service.stop()


def run(make: Callable[[], Service]) -> None:
    """Run the service that `make` builds (on the event loop) until SIGTERM or SIGINT.

    Raises ServiceFailed if it ends by itself, and whatever `start` raises.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    asyncio.run(_run(make))
