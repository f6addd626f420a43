"""The Coordinator service: the pool at a glance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tknp.coordinator.driver import Driver
from tknp.rpc.convert import block_to
from tknp.v1 import coordinator_pb2 as pb
from tknp.v1 import coordinator_pb2_grpc
from tknp.v1.common_pb2 import Phase


def runs(roots: Sequence[int]) -> list[pb.Root]:
    """Root of each layer -> the blocks that a stream goes through, in order."""
    found: list[pb.Root] = []
    for layer, node in enumerate(roots):
        if not found or found[-1].node != node:
            found.append(pb.Root(node=node, layer_start=layer))
        found[-1].layer_stop = layer + 1
    return found


class StatusService(coordinator_pb2_grpc.CoordinatorServicer):
    """Answers from what processes said last; never asks them itself."""

    def __init__(self, driver: Driver, model_name: str) -> None:
        self._driver = driver
        self._name = model_name
        self._started_s = driver.clock()

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        driver, pool, serving = self._driver, self._driver.pool, self._driver.serving
        counts = driver.counts
        status = pb.Status(
            ready=driver.phase == Phase.PHASE_READY,
            phase=driver.phase,
            model=self._name,
            dtype=pool.config.dtype,
            strategy=pool.layout.strategy,
            epoch=pool.config.epoch,
            tp=pool.layout.tp,
            page_size=pool.page_size,
            max_model_len=pool.max_model_len,
            nodes=[self._node(n) for n in range(pool.layout.nodes)],
            prefill=[self._prefill(p) for p in range(len(driver.peers.prefill))],
            completed=counts.completed,
            cancelled=counts.cancelled,
            refused=counts.refused,
            failed=counts.failed,
            uptime_s=driver.clock() - self._started_s,
            error=driver.error,
            copies=max(map(len, pool.layout.held)),
            width=pool.layout.width,
            reserve_ratio=pool.config.reserve_ratio,
            streams=[self._stream(s) for s in range(pool.layout.streams)],
        )
        kinds = {p.kv_transfer for p in status.prefill if p.kv_transfer}
        status.kv_transfer = ", ".join(sorted(kinds))
        if serving is not None:
            scheduler = serving.scheduler
            status.max_model_len = scheduler.limits.longest
            status.queued = len(scheduler.waiting)
            status.prefilling = len(scheduler.placed)
            status.running = scheduler.running
            status.steps = scheduler.steps
            status.preemptions = scheduler.preemptions
        return status

    def _node(self, node: int) -> pb.NodeStatus:
        pool, serving = self._driver.pool, self._driver.serving
        ranks = self._driver.peers.nodes[node]
        owner = ranks[0].owner
        status = pb.NodeStatus(
            node=node,
            addresses=[peer.address for peer in ranks],
            progress=ranks[0].progress,
            blocks=[block_to(block) for block in pool.layout.held[node]],
            weight_bytes=pool.weight_bytes(node),
        )
        if owner is not None:
            status.kv_bytes = owner.kv_bytes
            status.step_s = owner.step_s
        if serving is not None:
            scheduler = serving.scheduler
            load = scheduler.loads[node]
            status.pages, status.used_pages = load.pages, load.used
            status.capacity_tokens = load.pages * pool.page_size
            status.requests = scheduler.owned_requests(node)
            status.kv_tokens = scheduler.kv_tokens(node)
        return status

    def _stream(self, stream: int) -> pb.StreamStatus:
        layout, serving = self._driver.pool.layout, self._driver.serving
        status = pb.StreamStatus(
            stream=stream, owners=layout.owners[stream],
            roots=[] if layout.spread else runs(layout.roots(stream)),
        )  # fmt: skip
        if serving is not None:
            state = serving.scheduler.streams[stream]
            status.running, status.steps = len(state.running), state.steps
        return status

    def _prefill(self, replica: int) -> pb.PrefillStatus:
        ranks, serving = self._driver.peers.prefill[replica], self._driver.serving
        first = ranks[0].prefill
        return pb.PrefillStatus(
            addresses=[peer.address for peer in ranks],
            progress=ranks[0].progress,
            requests=serving.replicas.requests[replica] if serving is not None else 0,
            kv_transfer=first.kv_transfer if first is not None else "",
        )
