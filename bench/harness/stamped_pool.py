"""A coordinator's port without a pool behind it: streams tokens on time, each with its time.

    python bench/harness/stamped_pool.py PORT TOKENS_PER_SECOND [together]

The port is the coordinator's own: server, interceptors, `InferenceService`, queues of events. What
stands in for the pool puts a token into the events of each request when it is due. The text of a
token is that moment in nanoseconds of CLOCK_MONOTONIC, which every process of this machine reads
alike. Each stream keeps its own time, or with `together` all have theirs at the same moments, as
those of one decode step do. Prompts are tokenized as SmolLM2's are.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from types import SimpleNamespace
from typing import Any

from tknp.coordinator.inference import InferenceService
from tknp.coordinator.request import Event, Request
from tknp.coordinator.server import SERVICES
from tknp.model.checkpoint import Checkpoint, open_checkpoint
from tknp.model.tokenizer import Tokenizer, load_tokenizer
from tknp.rpc.channel import Server
from tknp.rpc.security import PLAINTEXT
from tknp.v1 import coordinator_pb2, coordinator_pb2_grpc, inference_pb2_grpc
from tknp.v1.common_pb2 import FinishReason, Token

NAME = "stamped"
_LONGEST = 1 << 20
_TICK_NS = 1000  # what ids count: 32 bits of them last for 71 minutes
_STARTED_NS = time.monotonic_ns()


class StampedTokenizer:
    """SmolLM2's for prompts; of what is generated an id is a time."""

    def __init__(self, prompts: Tokenizer) -> None:
        self.encode, self.chat, self.decode = prompts.encode, prompts.chat, prompts.decode
        self.has_chat_template = prompts.has_chat_template

    def stream(self) -> StampedTokenizer:
        return self

    def push(self, token_id: int) -> str:
        return f"{_STARTED_NS + token_id * _TICK_NS} "

    def flush(self) -> str:
        return ""


class StampedPool:
    """What `InferenceService` asks of a driver, and of a pool that is serving."""

    def __init__(self, checkpoint: Checkpoint, every_s: float, together: bool) -> None:
        self.clock = time.monotonic
        self.counts = SimpleNamespace(refused=0)
        self.metrics = SimpleNamespace(refused=lambda error: None)
        self.pool = SimpleNamespace(checkpoint=checkpoint, config=SimpleNamespace(dtype="float32"))
        limits = SimpleNamespace(longest=_LONGEST, output_tokens=lambda _, given: given)
        self.scheduler = SimpleNamespace(limits=limits)
        self._every_s = every_s
        self._together = together
        self._streams: dict[int, asyncio.Task[None]] = {}

    def open(self) -> StampedPool:
        return self

    def submit(self, request: Request) -> None:
        self._streams[id(request)] = asyncio.create_task(self._run(request))

    def cancel(self, request: Request) -> None:
        if (task := self._streams.pop(id(request), None)) is not None:
            task.cancel()

    complete = cancel

    async def _run(self, request: Request) -> None:
        began = self.clock()
        if self._together:
            began = (began // self._every_s + 1) * self._every_s
        last = request.params.max_tokens - 1
        for number in itertools.count():
            await asyncio.sleep(began + number * self._every_s - self.clock())
            stamp = (time.monotonic_ns() - _STARTED_NS) // _TICK_NS
            finish = FinishReason.FINISH_REASON_LENGTH if number == last else None
            request.events.put_nowait(Event((Token(token_id=stamp),), finish))
            if number == last:
                return


class AlwaysReady(coordinator_pb2_grpc.CoordinatorServicer):
    """Status of a pool that is."""

    async def GetStatus(self, request: Any, context: Any) -> coordinator_pb2.Status:
        return coordinator_pb2.Status(ready=True, model=NAME)


async def serve(port: int, tokens_per_s: float, together: bool) -> None:
    checkpoint = open_checkpoint("smollm2")
    tokenizer: Any = StampedTokenizer(load_tokenizer(checkpoint))
    driver: Any = StampedPool(checkpoint, 1 / tokens_per_s, together)
    server = Server(f"127.0.0.1:{port}", SERVICES, PLAINTEXT, public=True)
    service = InferenceService(driver, tokenizer, NAME)
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server.grpc)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(AlwaysReady(), server.grpc)
    await server.start()
    await server.ready(True)
    print("ready", flush=True)
    await server.grpc.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:] == ["together"]))
