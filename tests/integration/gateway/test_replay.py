"""Streams outlive their pool: what a client sees of one that restarts, and of one that doesn't."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tknp.local import InProcessPool

pytestmark = pytest.mark.slow
TOKENS = 120
BODY = {"model": "speaker", "prompt": "x", "temperature": 5.0, "max_tokens": TOKENS, "stream": True}


async def stream(http: httpx2.AsyncClient, seed: int, begun: asyncio.Event | None = None) -> Any:
    """Text, usage and error of one stream; `begun` is set at its first token."""
    text, usage, error = "", None, None
    body = {**BODY, "seed": seed, "stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line.removeprefix("data: "))
            error = data.get("error", error)
            usage = data.get("usage", usage)
            text += "".join(choice["text"] for choice in data.get("choices", ()))
            if begun is not None:
                begun.set()
    return text, usage, error


@pytest.mark.parametrize("streams", [8, pytest.param(50, marks=pytest.mark.full)])
async def test_a_pool_that_restarts_costs_no_stream(
    open_speaker: Callable[..., Any], serving: Callable[..., Any], streams: int
) -> None:
    """Streams at several stages, the pool stopped under them and started again at its address."""
    pool = open_speaker()
    first = InProcessPool(pool)
    await first.__aenter__()
    async with (
        serving(pool.config.coordinator) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=120) as http,
    ):
        undisturbed = await asyncio.gather(*(stream(http, seed) for seed in range(streams)))
        begun = asyncio.Event()
        running = [asyncio.create_task(stream(http, seed, begun)) for seed in range(streams)]
        await begun.wait()
        await first.stop()
        async with InProcessPool(pool):
            assert await asyncio.gather(*running) == undisturbed
        metrics = (await http.get("/metrics")).text
    assert all(error is None and usage["completion_tokens"] for _, usage, error in undisturbed)
    counted = [line for line in metrics.splitlines() if line.startswith("tknp_gateway_replays")]
    assert sum(float(line.split()[-1]) for line in counted if "_total{" in line) >= 1


async def test_without_replay_a_lost_stream_says_so(
    open_speaker: Callable[..., Any], serving: Callable[..., Any]
) -> None:
    pool = open_speaker(nodes=1)
    running = InProcessPool(pool)
    await running.__aenter__()
    async with (
        serving(pool.config.coordinator, replays=0) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=120) as http,
    ):
        begun = asyncio.Event()
        task = asyncio.create_task(stream(http, 1, begun))
        await begun.wait()
        await running.stop()
        text, usage, error = await task
        assert text
        assert usage is None
        assert error["type"] == "service_unavailable_error"


async def test_another_pool_goes_on(
    open_speaker: Callable[..., Any], serving: Callable[..., Any]
) -> None:
    pools = [open_speaker(nodes=1) for _ in range(2)]
    lost, kept = (InProcessPool(pool) for pool in pools)
    await lost.__aenter__()
    async with (
        kept,
        serving(*(pool.config.coordinator for pool in pools)) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=120) as http,
    ):
        undisturbed = await asyncio.gather(*(stream(http, seed) for seed in range(4)))
        begun = asyncio.Event()
        running = [asyncio.create_task(stream(http, seed, begun)) for seed in range(4)]
        await begun.wait()
        await lost.stop()
        assert await asyncio.gather(*running) == undisturbed
