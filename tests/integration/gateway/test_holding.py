"""A request that comes while its pool restarts: held where the gateway may, refused where not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from tknp.local import InProcessPool

pytestmark = pytest.mark.slow
BODY = {"model": "speaker", "prompt": "x", "temperature": 0, "max_tokens": 8}


async def test_a_request_of_a_pool_that_restarts_is_held(
    open_speaker: Callable[..., Any], serving: Callable[..., Any],
    until: Callable[..., Awaitable[None]],
) -> None:  # fmt: skip
    pool = open_speaker(nodes=1)
    first = InProcessPool(pool)
    await first.__aenter__()
    async with (
        serving(pool.config.coordinator, hold_s=600, max_held=2) as served,
        httpx2.AsyncClient(base_url=served.url, timeout=120) as http,
    ):
        before = await http.post("/v1/completions", json=BODY)
        assert before.status_code == 200
        await first.stop()
        await until(lambda: not served.gateway.pools.ready)
        bodies = (BODY, {**BODY, "stream": True})
        held = [asyncio.create_task(http.post("/v1/completions", json=b)) for b in bodies]
        await until(lambda: served.gateway.holding.waiting == 2)
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert "2 requests wait already" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"]
        assert (await http.get("/ready")).status_code == 200
        async with InProcessPool(pool):
            whole, streamed = await asyncio.gather(*held)
    assert whole.status_code == streamed.status_code == 200
    assert whole.json()["choices"] == before.json()["choices"]
    assert streamed.text.endswith("data: [DONE]\n\n")
