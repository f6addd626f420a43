"""A request keeps its pages for as long as its prompt is under way, however many leases that is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tknp.client import Client, request_for
from tknp.kv.holding import Key, State
from tknp.local import InProcessPool
from tknp.prefill import replica
from tknp.v1.common_pb2 import Sampling


async def test_a_lease_is_renewed_until_the_transfer_is_complete(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Renewals come at once, instead of six times in 30 s; between two of them 20 s pass."""
    monkeypatch.setattr(replica, "_RENEWALS_A_LEASE", 3000)
    pool = make_pool(
        random_checkpoint(), nodes=1, page_size=16, kv_memory_bytes=1 << 20, kv_transfer="grpc"
    )
    skipped_s = [0.0]
    async with (
        InProcessPool(pool, lambda: time.monotonic() + skipped_s[0]) as running,
        Client(pool.config.coordinator) as client,
    ):
        requests, books = running.prefill[0].runtime.requests, running.nodes[0].runtime.books
        assert requests is not None
        assert books is not None
        finish, renew = requests.finish, books.renew
        reached, go_on, renewed = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def held(key: Key) -> int:
            reached.set()
            await go_on.wait()
            return await finish(key)

        def seen(*values: Any) -> None:
            renew(*values)
            renewed.set()

        monkeypatch.setattr(requests, "finish", held)
        monkeypatch.setattr(books, "renew", seen)

        async def tokens() -> int:
            request = request_for([1, 2, 3], Sampling(max_tokens=5, ignore_eos=True))
            return sum([len(r.token_ids) // 4 async for r in client.generate(request)])

        work = asyncio.create_task(tokens())
        await reached.wait()
        for _ in range(4):
            renewed.clear()
            await renewed.wait()
            skipped_s[0] += 20
        assert skipped_s[0] > 2 * pool.config.lease_s
        assert books.expired == 0
        assert books.counts()[State.RECEIVING] == 1
        go_on.set()
        assert await work == 5
