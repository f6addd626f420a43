"""The coordinator's process: one port with Inference, Coordinator, health and reflection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tknp.config import PoolConfig
from tknp.coordinator.driver import Driver
from tknp.coordinator.inference import InferenceService
from tknp.coordinator.status import StatusService
from tknp.metrics.http import MetricsServer
from tknp.model.tokenizer import load_tokenizer
from tknp.pool import Pool, open_pool
from tknp.rpc.channel import Server
from tknp.rpc.process import run
from tknp.rpc.security import Security, read_security
from tknp.v1 import coordinator_pb2, inference_pb2
from tknp.v1.coordinator_pb2_grpc import add_CoordinatorServicer_to_server
from tknp.v1.inference_pb2_grpc import add_InferenceServicer_to_server

_REFRESH_S = 1.0
_LINGER_S = 1.0
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
    coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name,
)


class CoordinatorServer:
    """Answers status at once; Inference is refused until the pool is ready.

    `metrics_address`: where it serves its metrics; None: where the pool file says.
    """

    def __init__(
        self,
        pool: Pool,
        clock: Callable[[], float] = time.monotonic,
        *,
        security: Security,
        metrics_address: str | None = None,
    ) -> None:
        self.driver = Driver(pool, clock, security)
        self._pool = pool
        self._server = Server(pool.config.coordinator, SERVICES, security, public=True)
        if metrics_address is None:
            metrics_address = pool.config.metrics_address
        registry = self.driver.metrics.registry
        self._metrics = MetricsServer(registry, metrics_address, pool.config.tls_files)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        name = self._pool.served_name
        tokenizer = load_tokenizer(self._pool.checkpoint)
        inference = InferenceService(self.driver, tokenizer, name)
        add_InferenceServicer_to_server(inference, self._server.grpc)
        add_CoordinatorServicer_to_server(StatusService(self.driver, name), self._server.grpc)
        self._metrics.start()
        await self._server.start()
        self.driver.start()
        self._tasks = [asyncio.create_task(self._health()), asyncio.create_task(self._refresh())]

    async def failed(self) -> str:
        """Wait until the pool can't go on, and until whoever follows it could ask why."""
        await self.driver.failed.wait()
        await asyncio.sleep(_LINGER_S)
        return self.driver.error

    async def drain(self) -> None:
        """Refuse new requests; open ones end, or fail after `drain_s`."""
        await self._server.ready(False)
        await self.driver.drain(self._pool.config.drain_s)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._metrics.close()
        await self.driver.stop()
        await self._server.stop()

    async def _health(self) -> None:
        await self.driver.ready.wait()
        await self._server.ready(True)
        await self.driver.failed.wait()
        await self._server.ready(False)
        await self._server.live(not self.driver.hung)

    async def _refresh(self) -> None:
        """Keep what is known of the processes fresh once they all run."""
        await self.driver.ready.wait()
        while not self.driver.failed.is_set():
            await asyncio.sleep(_REFRESH_S)
            await self.driver.look()


def serve(config: PoolConfig, metrics_address: str | None = None) -> None:
    """Serve the coordinator of `config` until SIGTERM or SIGINT, then drain it.

    `metrics_address` wins over the pool file's. Raises TknpError when the pool file or the
    checkpoint is bad, or when the pool fails.
    """
    if metrics_address:
        config.check_metrics("metrics_address", metrics_address)
    pool = open_pool(config)
    security = read_security(config)
    run(lambda: CoordinatorServer(pool, security=security, metrics_address=metrics_address))
