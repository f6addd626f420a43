"""A prefill replica that is told to stop ends what it has, or hands it on, and takes no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tknp.client import Client, request_for
from tknp.local import InProcessPool
from tknp.rpc.ids import unpack_ids
from tknp.v1.common_pb2 import Phase, Sampling


@pytest.fixture
def open_pool(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> Callable[..., Any]:
    path = random_checkpoint(layers=2, q_heads=4, kv_heads=2)
    return lambda **settings: make_pool(
        path, nodes=1, page_size=16, kv_memory_bytes="512KiB", kv_transfer="grpc", prefill=2,
        **settings,
    )  # fmt: skip


async def ids(responses: AsyncIterator[Any]) -> list[int]:
    return [i async for r in responses for i in unpack_ids("token_ids", r.token_ids)]


def held_up(running: InProcessPool, index: int) -> tuple[asyncio.Queue[int], asyncio.Event]:
    """Prompts as process `index` of prefill gets them; it goes on once the event is set."""
    requests: Any = running.prefill[index].runtime.requests
    real, seen, gate = requests.open, asyncio.Queue[int](), asyncio.Event()

    async def opened(key: Any, tokens: int, target: Any) -> None:
        seen.put_nowait(tokens)
        await gate.wait()
        await real(key, tokens, target)

    requests.open = opened
    return seen, gate


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_prompts_in_hand_end_and_new_ones_go_elsewhere(
    open_pool: Callable[..., Any], tp: int
) -> None:
    pool = open_pool(drain_s=600, prefill_tp=tp)
    async with InProcessPool(pool) as running, Client(pool.config.coordinator) as client:
        ask = request_for([1, 2, 3], Sampling(max_tokens=6, ignore_eos=True))
        expected = await ids(client.generate(ask))
        (seen, gate), (others, opened) = held_up(running, 0), held_up(running, tp)
        opened.set()
        in_hand = asyncio.create_task(ids(client.generate(ask)))
        await seen.get()
        ranks = running.prefill[:tp]
        draining = [asyncio.create_task(rank.drain()) for rank in ranks]
        await asyncio.gather(*(_phase(rank.runtime, Phase.PHASE_DRAINING) for rank in ranks))
        assert await ids(client.generate(ask)) == expected
        assert await others.get() == 3
        assert not draining[0].done()
        gate.set()
        assert await in_hand == expected
        await draining[0]
        for rank in ranks:
            await rank.stop()
        await asyncio.gather(*draining)  # other ranks end with the first
        assert seen.empty()
        assert others.empty()  # it ended where it had begun


async def test_what_does_not_end_in_time_is_handed_on(open_pool: Callable[..., Any]) -> None:
    pool = open_pool(drain_s=0.05)
    async with InProcessPool(pool) as running, Client(pool.config.coordinator) as client:
        ask = request_for([1, 2, 3], Sampling(max_tokens=6, ignore_eos=True))
        expected = await ids(client.generate(ask))
        seen, _ = held_up(running, 0)
        in_hand = asyncio.create_task(ids(client.generate(ask)))
        await seen.get()
        await running.prefill[0].drain()
        assert not in_hand.done()
        await running.prefill[0].stop()
        assert await in_hand == expected


async def _phase(runtime: Any, phase: int) -> None:
    async with asyncio.timeout(60):
        while runtime.life.phase != phase:  # noqa: ASYNC110 - nobody tells when this changes
            await asyncio.sleep(0.01)
