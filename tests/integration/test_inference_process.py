"""The run loop of a process: the first signal drains, the second stops, a failure ends it."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

SERVICE = """
import asyncio, sys
from tknp.rpc.process import ServiceFailed, run

def say(word):
    print(word, flush=True)

class Service:
    def __init__(self):
        self.trouble = asyncio.get_running_loop().create_future()

    async def start(self):
        say("started")

    async def failed(self):
        return await self.trouble

    async def stop(self):
        say("stopped")

class Draining(Service):
    async def drain(self):
        say("draining")
        if sys.argv[1] == "stuck":
            await asyncio.Event().wait()
        if sys.argv[1] == "fails":
            self.trouble.set_result("its node is gone")
            await asyncio.Event().wait()
        say("drained")

try:
    run(Service if sys.argv[1] == "plain" else Draining)
except ServiceFailed as error:
    say(f"failed: {error}")
say("over")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("kind", "signals", "said"),
    [
        ("plain", 1, ["started", "stopped", "over"]),
        ("done", 1, ["started", "draining", "drained", "stopped", "over"]),
        ("stuck", 2, ["started", "draining", "stopped", "over"]),
        ("fails", 1, ["started", "draining", "stopped", "failed: its node is gone", "over"]),
    ],
)
async def test_signals(kind: str, signals: int, said: list[str], number: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVICE, kind, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    heard = []
    for word in said:
        heard.append((await process.stdout.readline()).decode().strip())
        if word == "started" or (word == "draining" and signals == 2):
            process.send_signal(number)
    assert heard == said
    assert await process.wait() == 0
