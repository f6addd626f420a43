"""Steps from TP rank 0 to another TP rank of its node, and the answers back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from grpc import aio

from tknp.rpc.outbox import Outbox
from tknp.v1.step_pb2 import Step

if TYPE_CHECKING:
    from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerAsyncStub
    from tknp.v1.decode_root_pb2_grpc import DecodeRootAsyncStub
    from tknp.worker.answers import Answers


class Relay:
    """One Run call to the TP rank that `name` names; what it says goes to `answers`."""

    def __init__(
        self, stub: DecodeRootAsyncStub | AttentionOwnerAsyncStub, name: str, answers: Answers
    ) -> None:
        self.steps: Outbox[Step] = Outbox()
        self._name = name
        self._answers = answers
        self._call = stub.Run(self.steps)
        self._reader = asyncio.create_task(self._read())

    def close(self, lost: bool) -> None:
        """No more steps. `lost`: not because they were over, which the other rank has to know."""
        self.steps.close()
        if lost:
            self._call.cancel()

    async def _read(self) -> None:
        try:
            async for result in self._call:
                self._answers.answered(result)
        except (aio.AioRpcError, asyncio.CancelledError):
            pass
        finally:
            self._answers.lost(f"{self._name} ended its steps")
