"""The step streams: one call to TP rank 0 of every node carries the steps of all its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from grpc import aio

from tknp.coordinator.startup import Peer
from tknp.engine.batch import Delta
from tknp.errors import Unavailable
from tknp.layout.layout import Layout
from tknp.rpc.convert import delta_to
from tknp.rpc.outbox import Outbox
from tknp.rpc.status import error_from
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.step_pb2 import Step, StepResult


class StepCalls:
    """`sampled(result)` is called with the sampler's answer to each step of a stream,
    `finished(stream, step)` when every node that takes part has answered it, `lost(reason)` once
    when a call breaks. All on the event loop. Nodes get the steps of all streams in one order.
    """

    def __init__(
        self,
        layout: Layout,
        leaders: Sequence[Peer],
        sampled: Callable[[StepResult], None],
        finished: Callable[[int, int], None],
        lost: Callable[[str], None],
    ) -> None:
        self._leaders = leaders
        self._sampled = sampled
        self._finished = finished
        self._lost = lost
        streams = range(layout.streams)
        self._members = [layout.members(stream) for stream in streams]
        self._samplers = [layout.sampler(stream) for stream in streams]
        self._answers: dict[tuple[int, int], int] = {}
        self._steps: list[Outbox[Step]] = [Outbox() for _ in leaders]
        self._rootless = [not held for held in layout.held]
        self._readers = [asyncio.create_task(self._read(n)) for n in range(len(leaders))]

    def send(self, delta: Delta) -> None:
        """Launch a step on every node of its stream."""
        message = delta_to(delta)
        self._answers[delta.stream, delta.step] = 0
        for node in self._members[delta.stream]:
            self._steps[node].put(message)

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
                self._answered(node, result)
            raise Unavailable(f"{place} ended its steps")
        except aio.AioRpcError as error:
            self._lost(str(error_from(error, place)))
        except Exception as error:
            self._lost(str(error))

    def _answered(self, node: int, result: StepResult) -> None:
        stream, step = result.stream, result.step
        if node == self._samplers[stream]:
            self._sampled(result)
        self._answers[stream, step] += 1
        if self._answers[stream, step] == len(self._members[stream]):
            del self._answers[stream, step]
            self._finished(stream, step)
