"""A whole pool in one process: every service on its loopback port, ranks as threads.

The services are the ones that processes run; only the data plane differs (`LocalHub`). Starting
takes a second instead of ten, which is what most tests want.

    async with InProcessPool(pool) as running:
        ... Client(pool.config.coordinator) ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from tknp.coordinator.server import CoordinatorServer
from tknp.errors import Unavailable
from tknp.layout.rank import Rank
from tknp.node.server import NodeServer
from tknp.pool import Pool
from tknp.prefill.server import PrefillServer
from tknp.rpc.process import Service
from tknp.rpc.security import read_security
from tknp.transport.local import LocalHub


class InProcessPool:
    """`pool` on this event loop. Entering waits until it is ready; leaving stops everything."""

    def __init__(self, pool: Pool, clock: Callable[[], float] = time.monotonic) -> None:
        config, security = pool.config, read_security(pool.config)
        self.hub = LocalHub(pool.layout.nodes, pool.layout.tp, config.timeout_s)
        hubs = [LocalHub(1, len(p.addresses), config.timeout_s) for p in config.prefill]
        self.coordinator = CoordinatorServer(pool, clock, security=security)
        self.nodes = [
            NodeServer(
                pool, rank, lambda _pool, rank, _device: self.hub.transport(rank), clock,
                security=security,
            )
            for rank in pool.layout.ranks()
        ]  # fmt: skip
        self.prefill = [
            PrefillServer(
                pool, p, t, lambda _pool, p, t, _device: hubs[p].transport(Rank(0, t)),
                clock, security=security,
            )
            for p, replica in enumerate(config.prefill)
            for t in range(len(replica.addresses))
        ]  # fmt: skip

    @property
    def _services(self) -> list[Service]:
        return [self.coordinator, *self.prefill, *self.nodes]

    async def __aenter__(self) -> Self:
        try:
            for service in reversed(self._services):
                await service.start()
            driver = self.coordinator.driver
            waits = [asyncio.create_task(event.wait()) for event in (driver.ready, driver.failed)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if driver.error:
                raise Unavailable(driver.error)
            await asyncio.gather(*(replica.settled() for replica in self.prefill))
            await driver.peers.refresh()  # it began with the first replica; here it knows all
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop the coordinator first, so that nobody starts a step that others no longer run."""
        for service in self._services:
            await service.stop()
