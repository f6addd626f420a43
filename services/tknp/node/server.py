"""Serves one TP rank of a decode node until it is told to stop or fails."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable

import torch

from tknp.attention_owner.service import OwnerService
from tknp.config import PoolConfig
from tknp.decode_root.service import RootService
from tknp.kernels.mailbox import choose_lanes
from tknp.layout.rank import Rank
from tknp.metrics.http import MetricsServer
from tknp.pool import Pool, open_pool
from tknp.rpc.channel import Server, connect
from tknp.rpc.process import run
from tknp.rpc.security import Security, read_security
from tknp.rpc.stall import STALLS_A_TIMEOUT, Stall
from tknp.transport.base import Transport
from tknp.transport.factory import join
from tknp.v1 import attention_owner_pb2, decode_root_pb2
from tknp.v1.attention_owner_pb2_grpc import add_AttentionOwnerServicer_to_server
from tknp.v1.decode_root_pb2_grpc import add_DecodeRootServicer_to_server
from tknp.v1.tracing_pb2_grpc import add_TracingServicer_to_server
from tknp.worker.runtime import Connect, DecodeRuntime
from tknp.worker.steps import StepServer
from tknp.worker.tracing import SERVICE as TRACING_SERVICE
from tknp.worker.tracing import TracingService

log = logging.getLogger(__name__)
# The engine needs the interpreter between kernels; the event loop gives it up that often.
_SWITCH_S = 0.000_1
_LOOK_S = 1.0
ROOT_SERVICE = decode_root_pb2.DESCRIPTOR.services_by_name["DecodeRoot"].full_name
OWNER_SERVICE = attention_owner_pb2.DESCRIPTOR.services_by_name["AttentionOwner"].full_name


def data_plane(pool: Pool, rank: Rank, device: torch.device) -> Transport:
    """The data plane of a rank that is a process."""
    config = pool.config
    return join(
        rank, pool.layout.nodes, pool.layout.tp, kind=config.transport,
        addresses=[a for node in config.nodes for a in node.addresses], meeting=config.data_plane,
        epoch=config.epoch, timeout_s=config.timeout_s, device=device, interface=config.interface,
        streams=pool.layout.streams,
        choose_lanes=choose_lanes,
    )  # fmt: skip


class NodeServer:
    """One rank with its port: DecodeRoot where it roots, AttentionOwner where it owns; Tracing.

    `metrics_address`: where it serves its metrics; None: where the pool file says.
    `alone`: no other rank computes in this process.
    """

    def __init__(
        self,
        pool: Pool,
        rank: Rank,
        connect_data_plane: Connect = data_plane,
        clock: Callable[[], float] = time.monotonic,
        *,
        security: Security,
        metrics_address: str | None = None,
        alone: bool = False,
    ) -> None:
        addresses = pool.config.nodes[rank.node].addresses
        others = addresses[1:] if rank.t == 0 else ()
        self.runtime = DecodeRuntime(pool, rank, connect_data_plane, clock, alone=alone)
        self._siblings = [connect(address, security) for address in others]
        self._names = [TRACING_SERVICE]
        if pool.config.nodes[rank.node].role != "attention-owner":
            self._names.append(ROOT_SERVICE)
        if pool.config.nodes[rank.node].role != "decode-root":
            self._names.append(OWNER_SERVICE)
        self._server = Server(addresses[rank.t], self._names, security)
        if metrics_address is None:
            metrics_address = pool.config.nodes[rank.node].metrics_address(rank.t)
        registry = self.runtime.metrics.registry
        self._metrics = MetricsServer(registry, metrics_address, pool.config.tls_files)
        self._stall = Stall(clock, STALLS_A_TIMEOUT * pool.config.timeout_s)
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        steps = StepServer(self.runtime, self._siblings)
        if ROOT_SERVICE in self._names:
            root = RootService(self.runtime, steps)
            add_DecodeRootServicer_to_server(root, self._server.grpc)
        if OWNER_SERVICE in self._names:
            owner = OwnerService(self.runtime, steps, self._siblings, self._clock)
            add_AttentionOwnerServicer_to_server(owner, self._server.grpc)
            self._tasks.append(asyncio.create_task(owner.tick()))
        tracing = TracingService(self.runtime.rank, self.runtime.recorder)
        add_TracingServicer_to_server(tracing, self._server.grpc)
        self._metrics.start()
        await self._server.start()
        self._tasks.append(asyncio.create_task(self._prepare()))
        self._tasks.append(asyncio.create_task(self._watch()))

    async def look(self) -> None:
        """One look at whether pending steps go on; a rank whose engine hangs has failed."""
        runtime = self.runtime
        hung = self._stall.look(runtime.submitted > runtime.stepped, runtime.stepped)
        if hung:
            await self._server.live(False)
            runtime.fail(f"rank {runtime.rank} hangs in step {runtime.stepped}: {hung}")

    async def failed(self) -> str:
        return await self.runtime.life.failed()

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._metrics.close()
        await self._server.stop()
        await asyncio.to_thread(self.runtime.close)
        for channel in self._siblings:
            await channel.close(None)

    async def _prepare(self) -> None:
        try:
            await self.runtime.load()
            await self.runtime.join()
        except Exception as error:
            log.exception("rank %s can't start", self.runtime.rank)
            self.runtime.fail(f"rank {self.runtime.rank} can't start: {error}")
        else:
            await self.runtime.warm.wait()
            await self._server.ready(True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await self.look()


def serve(config: PoolConfig, node: int, tp_rank: int, metrics_address: str | None = None) -> None:
    """Serve TP rank `tp_rank` of decode node `node` until SIGTERM or SIGINT.

    `metrics_address` wins over the pool file's. Raises TknpError when the pool file or the
    checkpoint is bad, or when the rank fails.
    """
    if metrics_address:
        config.check_metrics("metrics_address", metrics_address)
    pool = open_pool(config)
    security = read_security(config)
    rank = Rank(node, tp_rank)
    sys.setswitchinterval(_SWITCH_S)
    run(
        lambda: NodeServer(
            pool, rank, security=security, metrics_address=metrics_address, alone=True
        )
    )
