"""Serves one TP rank of a prefill replica until it is told to stop or fails.

Told to stop it says so to the coordinator, takes no new prompt and ends those in hand for
`drain_s`; what is left then is handed on: its call ends as lost and goes to another replica.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from tknp.config import PoolConfig
from tknp.kernels.mailbox import choose_lanes
from tknp.layout.rank import Rank
from tknp.metrics.http import MetricsServer
from tknp.pool import Pool, open_pool
from tknp.prefill.runtime import Connect, PrefillRuntime
from tknp.prefill.service import PrefillService
from tknp.rpc.channel import Server, connect
from tknp.rpc.process import run
from tknp.rpc.security import Security, read_security
from tknp.rpc.stall import STALLS_A_TIMEOUT, Stall
from tknp.transport.base import Transport
from tknp.transport.factory import join
from tknp.v1 import prefill_pb2
from tknp.v1.common_pb2 import Phase
from tknp.v1.prefill_pb2_grpc import add_PrefillServicer_to_server

log = logging.getLogger(__name__)
_LOOK_S = 1.0
SERVICE = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name


def data_plane(pool: Pool, replica: int, t: int, device: torch.device) -> Transport:
    """Joins the ranks of a replica, each a process."""
    config, mine = pool.config, pool.config.prefill[replica]
    return join(
        Rank(0, t), 1, len(mine.addresses), kind=config.transport,
        addresses=mine.addresses, meeting=mine.data_plane,
        epoch=config.epoch, timeout_s=config.timeout_s, device=device, interface=config.interface,
        choose_lanes=choose_lanes,
    )  # fmt: skip


class PrefillServer:
    """One rank with its port.

    `metrics_address`: where it serves its metrics; None: where the pool file says. `alone`: no
    other rank computes in this process.
    """

    def __init__(
        self,
        pool: Pool,
        replica: int,
        t: int,
        connect_replica: Connect = data_plane,
        clock: Callable[[], float] = time.monotonic,
        *,
        security: Security,
        metrics_address: str | None = None,
        alone: bool = False,
    ) -> None:
        addresses = pool.config.prefill[replica].addresses
        channel = partial(connect, security=security)
        self._siblings = [channel(a) for a in (addresses[1:] if t == 0 else ())]
        self.runtime = PrefillRuntime(
            pool, replica, t, self._siblings, connect_replica, channel, alone=alone
        )
        self._service = PrefillService(self.runtime)
        self._server = Server(addresses[t], [SERVICE], security)
        if metrics_address is None:
            metrics_address = pool.config.prefill[replica].metrics_address(t)
        registry = self.runtime.metrics.registry
        self._metrics = MetricsServer(registry, metrics_address, pool.config.tls_files)
        self._drain_s = pool.config.drain_s
        self._stall = Stall(clock, STALLS_A_TIMEOUT * pool.config.timeout_s)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        add_PrefillServicer_to_server(self._service, self._server.grpc)
        self._metrics.start()
        await self._server.start()
        self._tasks = [asyncio.create_task(self._prepare()), asyncio.create_task(self._watch())]

    async def look(self) -> None:
        """One look at whether pending chunks go on; a rank that hangs has failed."""
        rank = self.runtime.rank
        if rank is None:
            return
        hung = self._stall.look(rank.submitted > rank.finished, rank.layers + rank.finished)
        if hung:
            await self._server.live(False)
            self.runtime.fail(f"prefill rank {self.runtime.t} hangs in a chunk: {hung}")

    async def failed(self) -> str:
        return await self.runtime.life.failed()

    async def settled(self) -> None:
        """Wait until it is ready, or can't be."""
        await asyncio.wait(self._tasks[:1])

    async def drain(self) -> None:
        """Refuse new prompts; those in hand end, or are handed on after `drain_s`."""
        self.runtime.life.enter(Phase.PHASE_DRAINING)
        await self._server.ready(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                await self._service.idle()

    async def stop(self) -> None:
        """Stop. The port closes last: owners take a closed port for the end of all writes."""
        for task in self._tasks:
            task.cancel()
        await self._metrics.close()
        await self.runtime.close()
        await self._server.stop()
        for channel in self._siblings:
            await channel.close(None)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()

    async def _prepare(self) -> None:
        try:
            await self.runtime.prepare()
        except Exception as error:
            log.exception("prefill rank can't start")
            self.runtime.fail(f"prefill rank {self.runtime.t} can't start: {error}")
        else:
            await self._server.ready(True)


def serve(
    config: PoolConfig, replica: int, tp_rank: int, metrics_address: str | None = None
) -> None:
    """Serve TP rank `tp_rank` of prefill replica `replica` until SIGTERM or SIGINT.

    `metrics_address` wins over the pool file's. Raises TknpError when the pool file or the
    checkpoint is bad, or when the rank fails.
    """
    if metrics_address:
        config.check_metrics("metrics_address", metrics_address)
    pool = open_pool(config)
    security = read_security(config)
    run(
        lambda: PrefillServer(
            pool, replica, tp_rank, security=security, metrics_address=metrics_address, alone=True
        )
    )
