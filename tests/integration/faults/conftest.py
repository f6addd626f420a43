"""Every kind of process, killed and frozen, in every phase: nobody hangs and everybody says why.

Ranks are threads of this process, their data plane a hub. A process that is *killed* loses its
port, its connections and its place on the data plane at once. One that is *frozen* here is one
whose engine stands still while its port answers, which is harder to notice than a process that is
stopped (`test_faults_processes.py`): peers on the data plane time out, and a stall is found on a
clock that the test turns. A coordinator would stand still together with the test, so that one is a
process of its own, and is stopped. The table's phase of loading is in `test_faults_processes.py`.

What must hold after each: every open request ends with an error that names a cause, the others that
need the lost process fail within their time-outs, and the pages of ended requests are free.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tknp.client import Client, RequestFailed, request_for
from tknp.errors import TknpError
from tknp.kv.holding import State
from tknp.kv.pages import PagePool
from tknp.local import InProcessPool
from tknp.node.server import NodeServer
from tknp.prefill.server import PrefillServer
from tknp.v1.common_pb2 import Sampling

PROMPT = list(range(1, 100))
TIMEOUT_S = 2.0  # of the data plane: above what a busy machine may hold up a rank


class Clock:
    """Real time plus what the test adds to it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


class Block:
    """Holds up the thread that comes to it. `reached` is set on the event loop."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()

    def __call__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        self._go_on.wait()

    def release(self) -> None:
        self._go_on.set()


class Scene:
    """A running pool with one open request, and the means to break it."""

    NOTICED_S = 10.0
    SETTINGS: ClassVar[dict[str, Any]] = {
        "nodes": 2, "kv_memory_bytes": 2 << 20, "page_size": 16, "timeout_s": TIMEOUT_S,
        "prefill_chunk": 32, "kv_transfer": "grpc",
    }  # fmt: skip

    def __init__(self, pool: Any) -> None:
        self.clock = Clock()
        self.pool = pool
        self.running = InProcessPool(pool, self.clock)
        self.blocks: list[Block] = []
        self.tokens = 0
        self.got_tokens = asyncio.Event()
        self.killed: list[Any] = []

    @property
    def driver(self) -> Any:
        return self.running.coordinator.driver

    def block(self) -> Block:
        self.blocks.append(Block())
        return self.blocks[-1]

    async def generate(self, client: Client, max_tokens: int = 200) -> None:
        """One request; raises what ends it."""
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        async for response in client.generate(request_for(PROMPT, sampling)):
            self.tokens += len(response.token_ids)
            if self.tokens:
                self.got_tokens.set()

    async def kill(self, service: NodeServer | PrefillServer | Any) -> None:
        """What peers see of a process that is killed."""
        self.killed.append(service)
        runtime = getattr(service, "runtime", None)
        owner = runtime.rank if isinstance(service, PrefillServer) else runtime
        transport = getattr(owner, "_transport", None)
        if transport is not None:
            transport.abort("its process has died")
        await service._server.grpc.stop(None)

    def freeze(self, service: NodeServer | PrefillServer) -> Block:
        """Let nothing more run on the engine of `service`."""
        block = self.block()
        thread = (
            service.runtime._thread
            if isinstance(service, NodeServer)
            else service.runtime.rank._thread  # type: ignore[union-attr]
        )
        thread.submit(block)
        return block

    async def pages_return(self, *nodes: NodeServer) -> None:
        """Wait until no page of `nodes` is held by anybody."""
        for node in nodes:
            books = node.runtime.books
            assert books is not None
            await self.until(partial(_all_free, books))
            books.check_integrity()

    @staticmethod
    async def until(condition: Callable[[], bool]) -> None:
        """Wait for another task; pytest's own limit ends a wait in vain."""
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)

    @classmethod
    async def refused(cls, work: asyncio.Task[None], why: str | None = None) -> None:
        """`work` ends with an error that `why`, a pattern, is found in."""
        with pytest.raises((RequestFailed, TknpError), match=why):
            await asyncio.wait_for(work, cls.NOTICED_S)

    async def failed(self, why: str) -> None:
        """The pool fails with a reason that `why`, a pattern, is found in."""
        await asyncio.wait_for(self.driver.failed.wait(), self.NOTICED_S)
        assert re.search(why, self.driver.error), self.driver.error

    @staticmethod
    def in_layer(service: PrefillServer, block: Block) -> None:
        """`block` at the next attention layer of `service`: a prompt is being computed."""
        assert service.runtime.rank is not None
        attention = service.runtime.rank._attention
        attend = attention.attend

        def blocked(*arguments: Any) -> Any:
            block()
            return attend(*arguments)

        attention.attend = blocked  # type: ignore[method-assign]

    @staticmethod
    def in_finish(service: PrefillServer, reached: asyncio.Event, go_on: asyncio.Event) -> None:
        """Hold up `service` when all is computed and the owners do not have it all yet."""
        requests = service.runtime.requests
        assert requests is not None
        finish = requests.finish

        async def held(key: Any) -> int:
            reached.set()
            await go_on.wait()
            return await finish(key)

        requests.finish = held  # type: ignore[method-assign]


@pytest.fixture
def make_scene() -> type[Scene]:
    """Of an opened pool; nothing of it is started."""
    return Scene


@pytest.fixture
def scene(make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]) -> Any:
    """`async with scene(**settings) as (scene, client)`: a pool that is ready."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[tuple[Scene, Client]]:
        scene = Scene(make_pool(random_checkpoint(), **{**Scene.SETTINGS, **settings}))
        try:
            async with scene.running, Client(scene.pool.config.coordinator) as client:
                try:
                    yield scene, client
                finally:
                    for block in scene.blocks:
                        block.release()
        finally:
            for block in scene.blocks:
                block.release()

    return start


def _all_free(books: PagePool) -> bool:
    return books.counts()[State.FREE] == books.pages - 1
