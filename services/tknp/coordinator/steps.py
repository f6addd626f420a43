"""The step streams: one call to TP rank 0 of every node carries the steps of all its streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from grpc import aio

from tknp.coordinator.startup import Peer
from tknp.engine.batch import Delta
from tknp.errors import ProtocolError, Unavailable
from tknp.layout.layout import Layout
from tknp.rpc.convert import delta_to
from tknp.rpc.outbox import Outbox
from tknp.rpc.status import error_from
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.step_pb2 import Step, StepResult


class StepCalls:
    """`answered(result, drawn, last)` is called with each node's answer to each step of a stream:
    `drawn` tells that it is the sampler's, `last` that every node that takes part has answered.
    `lost(reason)` is called once when a call breaks. All on the event loop. Nodes get the steps of
    all streams in one order.
    """

    def __init__(
        self,
        layout: Layout,
        leaders: Sequence[Peer],
        answered: Callable[[StepResult, bool, bool], None],
        lost: Callable[[str], None],
    ) -> None:
        self._leaders = leaders
        self._answered = answered
        self._lost = lost
        streams = range(layout.streams)
        self._members = [layout.members(stream) for stream in streams]
        self._samplers = [layout.sampler(stream) for stream in streams]
        self._missing: dict[tuple[int, int], int] = {}  # answers to steps under way
        self._steps: list[Outbox[Step]] = [Outbox() for _ in leaders]
        self._rootless = [not held for held in layout.held]
        self._readers = [asyncio.create_task(self._read(n)) for n in range(len(leaders))]

    def send(self, delta: Delta) -> None:
        """Launch a step on every node of its stream."""
        message = delta_to(delta)
        members = self._members[delta.stream]
        self._missing[delta.stream, delta.step] = len(members)
        for node in members:
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
                self._take(node, result)
            raise Unavailable(f"{place} ended its steps")
        except ProtocolError as error:
            self._lost(f"{place}: {error}")
        except aio.AioRpcError as error:
            self._lost(str(error_from(error, place)))
        except Exception as error:
            self._lost(str(error))

    def _take(self, node: int, result: StepResult) -> None:
        stream, step = result.stream, result.step
        missing = self._missing.get((stream, step), 0) - 1
        if missing < 0:
            raise ProtocolError(f"answers step {step} of stream {stream}, which nobody waits for")
        if missing:
            self._missing[stream, step] = missing
        else:
            del self._missing[stream, step]
        self._answered(result, node == self._samplers[stream], not missing)
