"""A gateway is replaced under its streams: those that run end where they began."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from tknp.cli.ports import free_ports
from tknp.local import InProcessPool

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]
STREAMS = 4
# Starts a gateway, and at a line on standard input another version of it in its place.
SCRIPT = """
import dataclasses, sys
from tknp.gateway.ports import Ports
from tknp.gateway.serve_run import cluster, start
from tknp.gateway.settings import settings_from_text
settings = settings_from_text(dict(pools=sys.argv[1], http_port=sys.argv[2]))
with cluster() as directory, Ports("127.0.0.1", settings.http_port, 0, directory) as ports:
    start(settings, ports.path)
    print("started", flush=True)
    sys.stdin.readline()
    newer = dataclasses.replace(settings, max_prompt_tokens=2)
    start(newer, ports.path)  # returns when the old one is gone
"""


async def pieces(response: httpx2.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            yield "".join(choice["text"] for choice in json.loads(line[6:])["choices"])


async def test_an_update_cuts_no_stream(open_speaker: Callable[..., Any], words: str) -> None:
    pool = open_speaker(nodes=1, kv_memory_bytes=512 << 20)  # room for all streams at once
    (port,) = free_ports(1)
    async with InProcessPool(pool):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SCRIPT, pool.config.coordinator, str(port),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert await process.stdout.readline() == b"started\n"
            updated = asyncio.Event()

            async def stream(http: httpx2.AsyncClient, began: asyncio.Event) -> str:
                """Text until some while after the update."""
                body = {"model": "speaker", "prompt": "x", "temperature": 0, "stream": True}
                asked = http.stream("POST", "/v1/completions", json={**body, "max_tokens": 90_000})
                text, left = "", 100
                async with asked as response:
                    async for piece in pieces(response):
                        text += piece
                        began.set()
                        left -= updated.is_set()
                        if not left:
                            return text
                raise AssertionError(f"the stream ended after {len(text)} characters")

            url = f"http://127.0.0.1:{port}"
            async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
                began = [asyncio.Event() for _ in range(STREAMS)]
                running = [asyncio.create_task(stream(http, event)) for event in began]
                await asyncio.wait_for(asyncio.gather(*(event.wait() for event in began)), 60)
                process.stdin.write(b"\n")
                asked = {"model": "speaker", "prompt": "xyx", "max_tokens": 1}
                while True:  # the new version answers, while streams of the old one go on
                    answer = await http.post("/v1/completions", json=asked)
                    if answer.status_code == 400:
                        break
                    assert answer.status_code == 200, answer.text
                updated.set()
                for text in await asyncio.gather(*running):
                    assert (words * (len(text) // len(words) + 1)).startswith(text)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
