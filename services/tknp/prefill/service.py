"""The Prefill service of one rank."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from tknp.errors import ProtocolError, Unavailable
from tknp.kv.holding import Key
from tknp.prefill.follower import follow
from tknp.prefill.replica import Job
from tknp.prefill.runtime import PrefillRuntime
from tknp.rpc.checks import check_owners, check_prompt
from tknp.rpc.convert import key_from, sampling_from, token_to
from tknp.rpc.ids import unpack_ids
from tknp.sampling.params import validate
from tknp.v1 import prefill_pb2 as pb
from tknp.v1 import prefill_pb2_grpc
from tknp.v1.common_pb2 import DescribeRequest, Phase


class PrefillService(prefill_pb2_grpc.PrefillServicer):
    """Run is TP rank 0's, Follow that of the others."""

    def __init__(self, runtime: PrefillRuntime) -> None:
        self._runtime = runtime
        self._running: set[Key] = set()
        self._following = False
        self._ended = asyncio.Event()

    async def idle(self) -> None:
        """Wait until no prompt is in hand here, nor, on other TP ranks, at rank 0."""
        while self._running or self._following:
            self._ended.clear()
            await self._ended.wait()

    async def Describe(self, request: DescribeRequest, context: Any) -> pb.PrefillDescription:
        runtime = self._runtime
        return pb.PrefillDescription(
            compatibility=runtime.compatibility,
            progress=runtime.life.progress,
            tp=runtime.tp,
            tp_rank=runtime.t,
            requests=len(runtime.requests) if runtime.requests is not None else 0,
            kv_transfer=runtime.kv_transfer,
            max_prompt_tokens=runtime.max_prompt_tokens,
        )

    async def Run(self, request: pb.PrefillRequest, context: Any) -> pb.PrefillResponse:
        replica = self._runtime.replica
        if replica is None:
            raise Unavailable("this prefill rank is not ready, or not TP rank 0")
        if self._runtime.life.phase == Phase.PHASE_DRAINING:
            raise Unavailable("this prefill replica is shutting down")
        key, vocab_size = key_from(request.key), self._runtime.vocab_size
        prompt = unpack_ids("token_ids", request.token_ids)
        check_prompt(prompt, request.generated, vocab_size, self._runtime.max_prompt_tokens)
        check_owners(request.owners, len(request.placements))
        params = sampling_from(request.sampling, seed=0, max_tokens=1)
        validate(params, vocab_size)
        if key in self._running:
            raise ProtocolError(f"prefill of {key} is under way here: use another attempt number")
        self._running.add(key)
        try:
            result = await replica.run(
                Job(
                    key, request.epoch, prompt, params,
                    request.placements, request.owners, request.generated,
                )
            )  # fmt: skip
        finally:
            self._running.discard(key)
            self._ended.set()
        drawn = result.drawn
        token = token_to(drawn.token, drawn.logprobs, drawn.error)
        return pb.PrefillResponse(
            token=token,
            compute_s=result.compute_s,
            transfer_s=result.transfer_s,
            transferred_bytes=result.transferred_bytes,
        )

    async def Follow(
        self, chunks: AsyncIterator[pb.PrefillChunk], context: Any
    ) -> AsyncIterator[pb.ChunkDone]:
        runtime = self._runtime
        if runtime.requests is None or runtime.t == 0:
            raise Unavailable("this prefill rank is not ready, or is TP rank 0")
        if self._following:
            raise ProtocolError("TP rank 0 of this replica is giving chunks already")
        self._following = True
        following = follow(runtime.requests, runtime.vocab_size, chunks, runtime.fail)
        try:
            async with aclosing(following):
                async for done in following:
                    yield done
        finally:
            self._following = False
            self._ended.set()
