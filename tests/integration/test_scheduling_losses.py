"""A pool that loses prefill replicas, and one that is told to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tknp.client import Client, RequestFailed, request_for
from tknp.errors import Unavailable
from tknp.layout.rank import Rank
from tknp.local import InProcessPool
from tknp.prefill.server import PrefillServer
from tknp.rpc.ids import unpack_ids
from tknp.rpc.security import PLAINTEXT
from tknp.transport.local import LocalHub
from tknp.v1.common_pb2 import Phase, Sampling
from tknp.v1.inference_pb2 import GenerateRequest


@pytest.fixture
def open_pool(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        path = random_checkpoint(layers=2, q_heads=4, kv_heads=2)
        return make_pool(
            path, nodes=1, page_size=16, kv_memory_bytes="512KiB", kv_transfer="grpc", **settings
        )

    return make


def asks(prompt: list[int], tokens: int) -> GenerateRequest:
    return request_for(prompt, Sampling(max_tokens=tokens, ignore_eos=True))


async def ids(responses: AsyncIterator[Any]) -> list[int]:
    return [i async for r in responses for i in unpack_ids("token_ids", r.token_ids)]


async def first_success(attempt: Callable[[], Awaitable[list[int]]]) -> list[int]:
    """Repeat `attempt` until the pool has what it needs."""
    while True:
        with suppress(Unavailable, RequestFailed):
            return await attempt()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the coordinator will notice by itself."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.02)


def arrivals(pool: InProcessPool, replica: int, gate: asyncio.Event) -> asyncio.Queue[int]:
    """Prompt lengths as replica `replica` gets them; it computes none until `gate` is set."""
    requests: Any = pool.prefill[replica].runtime.requests
    real, seen = requests.open, asyncio.Queue[int]()

    async def opened(key: Any, tokens: int, target: Any) -> None:
        seen.put_nowait(tokens)
        await gate.wait()
        await real(key, tokens, target)

    requests.open = opened
    return seen


async def test_requests_of_a_lost_replica_go_to_another(open_pool: Callable[..., Any]) -> None:
    """Lost while it computes, then the other one too, then one is back."""
    pool = open_pool(prefill=2)
    async with InProcessPool(pool) as running, Client(pool.config.coordinator) as client:
        expected = await ids(client.generate(asks([1, 2, 3], 12)))
        held = asyncio.Event()
        seen = arrivals(running, 0, held)
        lost = asyncio.create_task(ids(client.generate(asks([1, 2, 3], 12))))
        assert await seen.get() == 3
        await running.prefill[0].stop()
        assert await lost == expected
        assert await ids(client.generate(asks([1, 2, 3], 12))) == expected

        await running.prefill[1].stop()
        with pytest.raises(RequestFailed) as raised:
            await ids(client.generate(asks([1, 2, 3], 12)))
        assert raised.value.code == "UNAVAILABLE"
        assert raised.value.message.startswith("no prefill replica is left: prefill 0, rank 0 at ")
        assert "prefill 1, rank 0 at " in raised.value.message

        hub = LocalHub(1, 1, pool.config.timeout_s)
        again = PrefillServer(pool, 0, 0, lambda *_: hub.transport(Rank(0, 0)), security=PLAINTEXT)
        await again.start()
        try:
            assert (
                await first_success(lambda: ids(client.generate(asks([1, 2, 3], 12)))) == expected
            )
        finally:
            await again.stop()
        books = running.nodes[0].runtime.books
        assert books is not None
        books.check_integrity()


async def test_replicas_come_and_go_while_the_pool_runs(open_pool: Callable[..., Any]) -> None:
    """One is enough to begin; what comes and what goes is noticed though nobody asks anything."""
    pool = open_pool(prefill=2)
    running = InProcessPool(pool)
    late = running.prefill.pop(1)
    async with running, Client(pool.config.coordinator) as client:
        expected = await ids(client.generate(asks([1, 2, 3], 12)))
        peers = running.coordinator.driver.peers.prefill
        assert peers[1][0].prefill is None
        assert peers[1][0].lost
        await late.start()
        try:
            await until(lambda: peers[1][0].progress.phase == Phase.PHASE_READY)
            assert (await client.status()).prefill[1].progress.phase == Phase.PHASE_READY
            await running.prefill[0].stop()
            await until(lambda: bool(peers[0][0].lost))
            assert await ids(client.generate(asks([1, 2, 3], 12))) == expected
        finally:
            await late.stop()


async def test_the_replica_with_the_least_to_do_is_taken(open_pool: Callable[..., Any]) -> None:
    pool = open_pool(prefill=2)
    async with InProcessPool(pool) as running, Client(pool.config.coordinator) as client:
        gate = asyncio.Event()
        seen = [arrivals(running, replica, gate) for replica in range(2)]
        tasks = []
        for length, replica in [(90, 0), (20, 1), (30, 1), (40, 1), (10, 0)]:
            request = client.generate(asks([1] * length, 2))
            await anext(request)
            tasks.append(asyncio.create_task(ids(request)))
            status = await client.status()
            while sum(p.requests for p in status.prefill) < len(tasks):
                status = await client.status()
            counts = [p.requests for p in status.prefill]
            assert counts[replica] > 0
        assert counts == [2, 3]
        gate.set()
        await asyncio.gather(*tasks)
        assert [seen[0].qsize(), seen[1].qsize()] == [2, 3]


async def test_draining_lets_open_requests_end_and_takes_no_new_ones(
    open_pool: Callable[..., Any],
) -> None:
    pool = open_pool()
    async with InProcessPool(pool) as running, Client(pool.config.coordinator) as client:
        gate = asyncio.Event()
        arrivals(running, 0, gate)
        early = client.generate(asks([4, 5], 6))
        await anext(early)
        drained = asyncio.create_task(running.coordinator.drain())
        while (await client.status()).phase != Phase.PHASE_DRAINING:
            pass
        with pytest.raises(RequestFailed, match=r"takes no requests: draining") as raised:
            await ids(client.generate(asks([1], 1)))
        assert raised.value.code == "UNAVAILABLE"
        async with aio.insecure_channel(client.target) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not (await client.status()).ready
        assert not drained.done()
        gate.set()
        assert len(await ids(early)) == 6
        await drained


async def test_draining_ends_with_its_time(open_pool: Callable[..., Any]) -> None:
    pool = open_pool(drain_s=0.2)
    async with InProcessPool(pool) as running, Client(pool.config.coordinator) as client:
        gate = asyncio.Event()
        arrivals(running, 0, gate)
        stuck = client.generate(asks([4, 5], 6))
        await anext(stuck)
        await running.coordinator.drain()
        with pytest.raises(RequestFailed, match=r"having drained for 0\.2 s") as raised:
            await ids(stuck)
        assert raised.value.code == "UNAVAILABLE"
        assert (await client.status()).failed == 1
        gate.set()
