"""A pool's public port with canned answers: a real gRPC server on loopback, in its own thread."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from tknp.v1 import common_pb2, coordinator_pb2_grpc, inference_pb2_grpc
from tknp.v1.common_pb2 import Alternative, Block, Logprobs, Progress
from tknp.v1.coordinator_pb2 import GetStatusRequest, NodeStatus, PrefillStatus, Status
from tknp.v1.inference_pb2 import (
    Accepted,
    Finish,
    GenerateRequest,
    GenerateResponse,
    GetModelRequest,
    GetModelResponse,
    Timings,
    TokenizeRequest,
    TokenizeResponse,
)


def ready_status() -> Status:
    ready = Progress(phase=common_pb2.PHASE_READY, loaded_bytes=7, total_bytes=7)
    return Status(
        ready=True, phase=common_pb2.PHASE_READY, model="tiny", dtype="float32", strategy="tknp",
        epoch=3, tp=1, page_size=64, max_model_len=2048, running=2, completed=5,
        steps=9_007_199_254_740_993, kv_transfer="grpc", uptime_s=3723.0,
        nodes=[
            NodeStatus(
                node=0, addresses=["127.0.0.1:11"], progress=ready,
                blocks=[Block(layer_stop=15, embedding=True, head=True)],
                weight_bytes=300 * 2**20, kv_bytes=2**29, pages=100, used_pages=90,
                capacity_tokens=6336, kv_tokens=5000, requests=2, step_s=0.0123,
            ),
            NodeStatus(
                node=1, addresses=["127.0.0.1:12"], progress=ready,
                blocks=[Block(layer_start=15, layer_stop=30)],
                weight_bytes=200 * 2**20, kv_bytes=2**29, pages=100, capacity_tokens=6336,
            ),
        ],
        prefill=[PrefillStatus(addresses=["127.0.0.1:13"], progress=ready, kv_transfer="grpc")],
    )  # fmt: skip


@dataclass
class FakePool(inference_pb2_grpc.InferenceServicer, coordinator_pb2_grpc.CoordinatorServicer):
    """Answers every prompt with its own text reversed, two words a message.

    Prompts with a meaning: `refuse` INVALID_ARGUMENT; `drain` UNAVAILABLE; `cut` ends without
    finish; `hang` answers once, then waits until cancelled.
    """

    status: Status = field(default_factory=ready_status)
    has_chat_template: bool = True
    requests: list[GenerateRequest] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    target: str = ""
    stop: Callable[[], None] = lambda: None

    async def GetStatus(self, request: GetStatusRequest, context: object) -> Status:
        return self.status

    async def GetModel(self, request: GetModelRequest, context: object) -> GetModelResponse:
        return GetModelResponse(
            name="tiny", family="llama", dtype="float32", vocab_size=100, max_model_len=2048,
            has_chat_template=self.has_chat_template,
        )  # fmt: skip

    async def Tokenize(self, request: TokenizeRequest, context: object) -> TokenizeResponse:
        text = request.text or request.chat.messages[-1].content
        return TokenizeResponse(token_ids=struct.pack(f"<{len(text)}I", *map(ord, text)))

    async def Generate(
        self, request: GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        kind = request.WhichOneof("prompt")
        if kind == "chat":
            prompt = request.chat.messages[-1].content
        else:
            prompt = request.text if kind == "text" else "by ids"
        if prompt == "refuse":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "max_tokens=0: must be\nat least 1"
            )
        if prompt == "drain":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the pool is draining")
        complete = False
        try:
            async for message in self._answer(request, prompt):
                yield message
            complete = True
        finally:
            if not complete:
                self.cancelled.set()

    async def _answer(
        self, request: GenerateRequest, prompt: str
    ) -> AsyncIterator[GenerateResponse]:
        yield GenerateResponse(accepted=Accepted(request_id="r-1", prompt_tokens=len(prompt)))
        words = [f"{word} " for word in reversed(prompt.split())]
        for start in range(0, len(words), 2):
            pair = words[start : start + 2]
            message = GenerateResponse(text="".join(pair), token_ids=struct.pack(
                f"<{len(pair)}I", *range(start, start + len(pair))))  # fmt: skip
            if request.sampling.HasField("logprobs"):
                other = Alternative(token_id=7, logprob=-2.5)
                message.logprobs.extend(Logprobs(chosen=-0.5, alternatives=[other]) for _ in pair)
            yield message
        if prompt == "hang":
            await asyncio.Event().wait()
        if prompt != "cut":
            timings = Timings(queue_s=0.5, prefill_s=0.25)
            yield GenerateResponse(
                finish=Finish(
                    reason=common_pb2.FINISH_REASON_STOP, prompt_tokens=len(prompt),
                    completion_tokens=len(words), owners=[1], timings=timings,
                )
            )  # fmt: skip


async def _serve(pool: FakePool, started: threading.Event) -> None:
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(pool, server)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(pool, server)
    pool.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    thread = threading.current_thread()

    def stop_it() -> None:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
            thread.join()

    pool.stop = stop_it
    started.set()
    await stop.wait()
    await server.stop(None)


@pytest.fixture
def fake_pool() -> Iterator[FakePool]:
    pool, started = FakePool(), threading.Event()
    threading.Thread(target=lambda: asyncio.run(_serve(pool, started))).start()
    started.wait()
    yield pool
    pool.stop()


@pytest.fixture
def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
