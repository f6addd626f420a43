"""A coordinator without a model: streams tokens on time, each with the time it was sent.

    python bench/harness/stamped_pool.py PORT TOKENS_PER_SECOND

It answers what a gateway and a client ask of a pool. The text of each message is the nanoseconds of
CLOCK_MONOTONIC at which it was handed to gRPC, which every process of this machine reads alike.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

from grpc import aio

from tknp.rpc.ids import pack_ids
from tknp.v1 import common_pb2, coordinator_pb2, coordinator_pb2_grpc, inference_pb2_grpc
from tknp.v1 import inference_pb2 as pb

_OPTIONS = (
    ("grpc.so_reuseport", 0),
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
)


class StampedInference(inference_pb2_grpc.InferenceServicer):
    """Every request gets max_tokens tokens, `every_s` apart."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id=request.request_id))
        began = time.monotonic()
        for number in range(request.sampling.max_tokens):
            await asyncio.sleep(began + number * self._every_s - time.monotonic())
            yield pb.GenerateResponse(token_ids=pack_ids([7]), text=f"{time.monotonic_ns()} ")
        finish = pb.Finish(
            reason=common_pb2.FINISH_REASON_LENGTH, prompt_tokens=1,
            completion_tokens=request.sampling.max_tokens,
        )  # fmt: skip
        yield pb.GenerateResponse(finish=finish)

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        return pb.GetModelResponse(name="stamped", vocab_size=256, max_model_len=1 << 20)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse(token_ids=pack_ids([1]))


class AlwaysReady(coordinator_pb2_grpc.CoordinatorServicer):
    """Status of a pool that is."""

    async def GetStatus(self, request: Any, context: Any) -> coordinator_pb2.Status:
        return coordinator_pb2.Status(ready=True, model="stamped")


async def serve(port: int, tokens_per_s: float) -> None:
    server = aio.server(options=_OPTIONS)
    inference_pb2_grpc.add_InferenceServicer_to_server(StampedInference(1 / tokens_per_s), server)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(AlwaysReady(), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
