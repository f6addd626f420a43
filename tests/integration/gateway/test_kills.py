"""Processes of a pool are killed under the gateway's streams; the pool is started anew."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tknp.cli.ports import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]
STREAMS = 50
BODY = {
    "model": "speaker", "prompt": "x", "temperature": 5.0, "max_tokens": 400, "ignore_eos": True,
    "stream": True,
}  # fmt: skip


@asynccontextmanager
async def up(model: Path, port: int, runs: Path) -> AsyncIterator[Any]:
    """`tknp up` on `port`: the process, and the process ids of its services."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tknp.cli.main", "up", "--json", "--port", str(port),
        "--model", str(model), "--nodes", "2", "--kv-memory", "64MiB", "--dtype", "float32",
        "--run-dir", str(runs), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, json.loads(await process.stdout.readline())["pids"]
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def stream(
    http: httpx2.AsyncClient, seed: int, progress: Callable[[], None] = lambda: None
) -> str:
    """Text of one stream, which ends as it should; `progress` is called at each of its pieces."""
    text, finish = "", None
    async with http.stream("POST", "/v1/completions", json={**BODY, "seed": seed}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line.removeprefix("data: "))
            assert "error" not in data, data
            for choice in data["choices"]:
                text += choice["text"]
                finish = choice["finish_reason"] or finish
            progress()
    assert finish == "length"
    return text


@pytest.mark.parametrize("victim", ["prefill-0", "decode-node-1", "coordinator"])
async def test_a_killed_process_costs_no_stream(
    speaker: Path, serving: Callable[..., Any], until: Callable[..., Awaitable[None]],
    tmp_path: Path, victim: str,
) -> None:  # fmt: skip
    (port,) = free_ports(1)
    async with (
        up(speaker, port, tmp_path / "first") as (process, pids),
        serving(f"127.0.0.1:{port}", replay_wait_s=240) as served,
        httpx2.AsyncClient(
            base_url=served.url, timeout=240, limits=httpx2.Limits(max_connections=STREAMS)
        ) as http,
    ):
        undisturbed = await asyncio.gather(*(stream(http, seed) for seed in range(STREAMS)))
        begun = asyncio.Event()
        running = [asyncio.create_task(stream(http, seed, begun.set)) for seed in range(STREAMS)]
        await begun.wait()  # and every stream has been let in: some are queued, some under way
        await until(lambda: served.gateway.inflight + sum(t.done() for t in running) >= STREAMS)
        os.kill(pids[victim], signal.SIGKILL)
        assert await process.wait() == 1
        async with up(speaker, port, tmp_path / "second"):
            assert await asyncio.gather(*running) == undisturbed
        metrics = (await http.get("/metrics")).text
    counted = [line for line in metrics.splitlines() if line.startswith("tknp_gateway_replays")]
    assert sum(float(line.split()[-1]) for line in counted if "_total{" in line) >= 1
