"""The step streams: one to TP rank 0 of every node, results back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from grpc import aio

from tknp.coordinator.startup import Peer
from tknp.engine.batch import Delta
from tknp.errors import Unavailable
from tknp.pool import Pool
from tknp.rpc.convert import delta_to
from tknp.rpc.outbox import Outbox
from tknp.rpc.status import error_from
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.step_pb2 import Step, StepResult


class StepStreams:
    """`sampled(result)` is called with the sampler's answer to each step, `finished(step)` when
    every node has answered it, `lost(reason)` once when a stream breaks. All on the event loop.
    """

    def __init__(
        self,
        pool: Pool,
        leaders: Sequence[Peer],
        sampled: Callable[[StepResult], None],
        finished: Callable[[int], None],
        lost: Callable[[str], None],
    ) -> None:
        self._leaders = leaders
        self._sampler = pool.layout.sampler
        self._sampled = sampled
        self._finished = finished
        self._lost = lost
        self._answers: dict[int, int] = {}
        self._steps: list[Outbox[Step]] = [Outbox() for _ in leaders]
        self._rootless = [block.empty for block in pool.layout.blocks]
        self._readers = [asyncio.create_task(self._read(n)) for n in range(len(leaders))]

    def send(self, delta: Delta) -> None:
        """Launch a step on every node."""
        message = delta_to(delta)
        self._answers[delta.step] = 0
        for steps in self._steps:
            steps.put(message)

    def close(self) -> None:
        for reader in self._readers:
            reader.cancel()

    async def _read(self, node: int) -> None:
        peer = self._leaders[node]
        owner, root = AttentionOwnerStub(peer.channel), DecodeRootStub(peer.channel)
        run = owner.Run if self._rootless[node] else root.Run
        place = f"{peer.name} at {peer.address}"
        try:
            async for result in run(self._steps[node]):
                if result.error:
                    raise Unavailable(f"{place}: {result.error}")
                if node == self._sampler:
                    self._sampled(result)
                self._answers[result.step] += 1
                if self._answers[result.step] == len(self._steps):
                    del self._answers[result.step]
                    self._finished(result.step)
            raise Unavailable(f"{place} ended its steps")
        except aio.AioRpcError as error:
            self._lost(str(error_from(error, place)))
        except Exception as error:
            self._lost(str(error))
