"""What a key may have in flight holds over all replicas of a gateway, not for each."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tknp.cli.ports import free_ports
from tknp.local import InProcessPool

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]
KEY, LIMIT, TRIES = "key-0123456789abcdef", 3, 24
BODY = {"model": "speaker", "prompt": "x", "max_tokens": 100_000, "stream": True}


@asynccontextmanager
async def gateway(pool: str, directory: Path, **settings: Any) -> AsyncIterator[str]:
    """Address of a `tknp gateway` with `settings`."""
    (port,) = free_ports(1)
    path, log = directory / "gateway.yaml", directory / "log"
    path.write_text(yaml.safe_dump({"pools": [pool], "http_port": port, **settings}))
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tknp.cli.main", "gateway", "--settings", str(path),
            stdout=asyncio.subprocess.PIPE, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line.startswith(b"gateway: "), log.read_text()
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def opened(url: str, held: AsyncExitStack) -> int:
    """Status of one more stream, which `held` keeps; on a connection of its own."""
    http = await held.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=120))
    headers = {"Authorization": f"Bearer {KEY}"}
    asked = http.stream("POST", "/v1/completions", json=BODY, headers=headers)
    response = await held.enter_async_context(asked)
    return int(response.status_code)


async def test_replicas_share_a_limit(open_speaker: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump({"keys": [{"name": "a", "key": KEY, "max_requests": LIMIT}]}))
    pool = open_speaker(nodes=1, kv_memory_bytes=512 << 20)
    async with (
        InProcessPool(pool),
        gateway(
            pool.config.coordinator, tmp_path, keys_file=str(keys), min_replicas=2, max_replicas=2
        ) as url,
        AsyncExitStack() as held,
    ):
        async with AsyncExitStack() as first:
            found = [await opened(url, first) for _ in range(TRIES)]
            assert found == [200] * LIMIT + [429] * (TRIES - LIMIT)
        async with asyncio.timeout(60):  # they have left: as many may come, wherever they come to
            for _ in range(LIMIT):
                while await opened(url, held) != 200:
                    pass
        assert [await opened(url, held) for _ in range(TRIES)] == [429] * TRIES
