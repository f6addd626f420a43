"""Steps from TP rank 0 to another TP rank of its node, and the answers back, stream by stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpc import aio

from tknp.rpc.outbox import Outbox
from tknp.v1.step_pb2 import Step, StepResult

if TYPE_CHECKING:
    from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerAsyncStub
    from tknp.v1.decode_root_pb2_grpc import DecodeRootAsyncStub


class Relay:
    """One Run call to TP rank `t` of `node`. Streams answer in order, each for itself."""

    def __init__(
        self,
        stub: DecodeRootAsyncStub | AttentionOwnerAsyncStub,
        streams: Sequence[int],
        node: int,
        t: int,
    ) -> None:
        self.steps: Outbox[Step] = Outbox()
        self._name = f"TP rank {t} of node {node}"
        self._call = stub.Run(self.steps)
        self._answers: dict[int, asyncio.Queue[StepResult | None]] = {
            stream: asyncio.Queue() for stream in streams
        }
        self._reader = asyncio.create_task(self._read())

    async def error(self, stream: int) -> str:
        """What its next step of `stream` failed of; empty if it passed."""
        answer = await self._answers[stream].get()
        return answer.error if answer is not None else f"{self._name} ended its steps"

    def close(self, lost: bool) -> None:
        """No more steps. `lost`: not because they were over, which the other rank has to know."""
        self.steps.close()
        if lost:
            self._call.cancel()

    async def _read(self) -> None:
        try:
            async for result in self._call:
                self._answers[result.stream].put_nowait(result)
        except (aio.AioRpcError, asyncio.CancelledError):
            pass
        finally:
            for answers in self._answers.values():
                answers.put_nowait(None)
