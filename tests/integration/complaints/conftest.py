"""What users of other engines complain about, one test each, named by the complaint's number.

     1 late write after an abort        7 reaping only when busy     13 padding writes a live slot
     2 leak after an aborted load       8 queue behind the impossible 14 overlap loses count
     3 reject without telling prefill   9 ranks diverge              16 prompts at the context's end
     4 recycled pages are read         10 idle rank breaks the rest  17 one bad request ends all
     5 garbage after a prefill abort   11 hung, yet healthy          18 output varies with the batch
     6 abort nobody hears of           12 parity at the edges

Number 12's CUDA graphs and number 13's slot -1 have no counterpart here: steps are not captured,
and rows are addressed by page tables without padding. The nearest checks are layouts against one
rank (all of them: `tests/parity/test_strategies.py`), and a poisoned dummy page. Number 15, stops
and half characters, is in `tests/unit/model`.

Here: an owner by itself, and pools that the tests of a file share.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tknp.attention_owner.service import OwnerService
from tknp.client import Client
from tknp.kv.holding import Key, State
from tknp.layout.rank import Rank
from tknp.local import InProcessPool
from tknp.rpc.convert import key_to
from tknp.v1.attention_owner_pb2 import ReleaseRequest, ReserveRequest, TransferRequest
from tknp.worker.runtime import DecodeRuntime
from tknp.worker.steps import StepServer

PAGE = 16
KEY = Key("r", 0)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Owner:
    """An AttentionOwner of 9 pages without a port; calls its handlers."""

    def __init__(self, runtime: DecodeRuntime, clock: Clock) -> None:
        self.runtime = runtime
        self.clock = clock
        self.service = OwnerService(runtime, StepServer(runtime, []), [], clock)

    @property
    def counts(self) -> dict[State, int]:
        assert self.runtime.books is not None
        self.runtime.books.check_integrity()
        return {state: n for state, n in self.runtime.books.counts().items() if n}

    async def reserve(self, key: Key = KEY, tokens: int = 3 * PAGE, epoch: int = 1) -> list[int]:
        message = ReserveRequest(key=key_to(key), epoch=epoch, tokens=tokens, lease_s=30)
        return list((await self.service.Reserve(message, None)).placements[0].pages)

    async def release(self, key: Key = KEY) -> None:
        await self.service.Release(ReleaseRequest(key=key_to(key), epoch=1), None)

    async def transfer(self, call: str, key: Key = KEY, **fields: Any) -> None:
        values: dict[str, Any] = {
            "epoch": 1, "writer": "w", "one_sided": True,
            "compatibility": self.runtime.pool.compatibility, **fields,
        }  # fmt: skip
        await getattr(self.service, call)(TransferRequest(key=key_to(key), **values), None)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest_asyncio.fixture(loop_scope="module")
async def make_owner(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> AsyncIterator[Callable[[str], Any]]:
    made: list[DecodeRuntime] = []

    async def make(kind: str) -> Owner:
        page_bytes = 2 * 3 * 2 * 16 * 4 * PAGE
        pool = make_pool(
            random_checkpoint(), nodes=1, page_size=PAGE, kv_transfer=kind,
            kv_memory_bytes=10 * page_bytes,
        )  # fmt: skip
        clock = Clock()
        runtime = DecodeRuntime(pool, Rank(0, 0), lambda *_: pytest.fail("joined"), clock)
        await runtime.load()
        made.append(runtime)
        return Owner(runtime, clock)

    yield make
    for runtime in made:
        runtime.close()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> AsyncIterator[InProcessPool]:
    """Two nodes that hold 10 pages each, chunks of 32 tokens."""
    page_bytes = 2 * 3 * 2 * 16 * 4 * PAGE
    config = make_pool(
        random_checkpoint(), nodes=2, page_size=PAGE, prefill_chunk=32, kv_transfer="grpc",
        kv_memory_bytes=11 * page_bytes, width=1,
    )  # fmt: skip
    async with InProcessPool(config) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(pool: InProcessPool) -> AsyncIterator[Client]:
    async with Client(pool.nodes[0].runtime.pool.config.coordinator) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def one_rank(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> AsyncIterator[Client]:
    config = make_pool(
        random_checkpoint(), nodes=1, page_size=PAGE, kv_memory_bytes=1 << 20, kv_transfer="grpc"
    )
    async with InProcessPool(config), Client(config.config.coordinator) as made:
        yield made
