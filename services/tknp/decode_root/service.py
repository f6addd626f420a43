"""DecodeRoot on one rank. Steps come from the coordinator and go to the rank's engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from tknp.layout.rank import Rank
from tknp.rpc.convert import block_to
from tknp.sampling.params import check_schema_size
from tknp.v1 import decode_root_pb2_grpc
from tknp.v1.common_pb2 import DescribeRequest
from tknp.v1.decode_root_pb2 import PrepareRequest, PrepareResponse, RootDescription
from tknp.v1.step_pb2 import Step, StepResult
from tknp.worker.runtime import DecodeRuntime
from tknp.worker.steps import StepServer


class RootService(decode_root_pb2_grpc.DecodeRootServicer):
    """Holds no state of its own: weights are the runtime's, rows the step messages'."""

    def __init__(self, runtime: DecodeRuntime, steps: StepServer) -> None:
        self._runtime = runtime
        self._steps = steps

    async def Describe(self, request: DescribeRequest, context: Any) -> RootDescription:
        runtime, layout = self._runtime, self._runtime.pool.layout
        samplers = {Rank(layout.sampler(stream), 0) for stream in range(layout.streams)}
        return RootDescription(
            compatibility=runtime.pool.compatibility,
            progress=runtime.life.progress,
            epoch=runtime.pool.config.epoch,
            node=runtime.rank.node,
            tp_rank=runtime.rank.t,
            blocks=[block_to(block) for block in layout.held[runtime.rank.node]],
            samples=runtime.rank in samplers,
            weight_bytes=runtime.life.total_bytes,
        )

    async def Prepare(self, request: PrepareRequest, context: Any) -> PrepareResponse:
        check_schema_size(request.json_schema)
        await asyncio.to_thread(self._runtime.grammars.compile, request.json_schema)
        return PrepareResponse()

    async def Run(self, steps: AsyncIterator[Step], context: Any) -> AsyncIterator[StepResult]:
        async for result in self._steps.run(steps):
            yield result
