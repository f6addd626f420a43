"""A pool of real processes under load for minutes, while prefill replicas and clients die.

Run by `make soak`, not by CI. Every token is compared with what the same pool gave when nothing
else ran; memory of the processes that stay and pages of the owners must not grow.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tknp.client import Client, RequestFailed, request_for
from tknp.config import write_pool
from tknp.errors import TknpError, Unavailable
from tknp.rpc.ids import unpack_ids
from tknp.v1.common_pb2 import Sampling

CLIENTS = 12
TOKENS = 48
RETRY_S = 0.5
KILL_EVERY_S = 20.0
SETTLED_SHARE = 0.25  # of the time: caches and arenas have grown to their size by then
MEMORY_GROWTH = 1.10


class Processes:
    """The services of a pool, each a process that can be killed and started again."""

    def __init__(self, pool_file: Path, logs: Path) -> None:
        self._pool_file = pool_file
        self._logs = logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, role: str, *which: str) -> None:
        command = [sys.executable, "-m", "tknp.cli.main", "serve", role, "--pool",
                   str(self._pool_file), *which]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self._logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(command, stderr=log, env=environment)

    def kill(self, name: str) -> None:
        self.running[name].send_signal(signal.SIGKILL)
        self.running.pop(name).wait()

    def memory(self) -> dict[str, int]:
        """Resident bytes of each process."""
        return {n: psutil.Process(p.pid).memory_info().rss for n, p in self.running.items()}

    def stop(self) -> None:
        for process in self.running.values():
            process.terminate()
        for process in self.running.values():
            process.wait(30)


async def ready(client: Client) -> None:
    while True:
        try:
            if (await client.status()).ready:
                return
        except Unavailable:
            pass
        await asyncio.sleep(0.5)


async def ask(client: Client, prompt: Sequence[int], leaves_after: int | None) -> list[int]:
    ids: list[int] = []
    request = request_for(prompt, Sampling(max_tokens=TOKENS, ignore_eos=True))
    async with aclosing(client.generate(request)) as stream:
        async for response in stream:
            ids += unpack_ids("token_ids", response.token_ids)
            if leaves_after is not None and len(ids) >= leaves_after:
                break
    return ids


async def load(
    client: Client, dice: random.Random, expected: dict[tuple[int, ...], list[int]],
    until: float, ends: Counter[str],
) -> None:  # fmt: skip
    while time.monotonic() < until:
        prompt = dice.choice(list(expected))
        leaves_after = dice.randint(0, TOKENS) if dice.random() < 0.3 else None
        try:
            ids = await ask(client, prompt, leaves_after)
        except RequestFailed as error:
            ends[error.code] += 1
            await asyncio.sleep(RETRY_S)
            continue
        assert ids == expected[prompt][: len(ids)], "a token differs from the undisturbed run"
        ends["cancelled" if leaves_after is not None else "complete"] += 1


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_memory_pages_and_tokens_stay_as_they_are(
    soak_s: float, make_pool: Callable[..., Any], tmp_path: Path
) -> None:
    pool = make_pool(
        "smollm2", nodes=2, prefill=2, dtype="bfloat16", kv_memory_bytes="64MiB",
        max_model_len=1024, timeout_s=10.0,
    )  # fmt: skip
    write_pool(pool.config, tmp_path / "pool.yaml")
    processes, dice = Processes(tmp_path / "pool.yaml", tmp_path), random.Random(1)
    processes.start("coordinator", "coordinator")
    for n in range(2):
        processes.start(f"node-{n}", "decode-node", "--node", str(n))
        processes.start(f"prefill-{n}", "prefill", "--replica", str(n))
    try:
        async with Client(pool.config.coordinator) as client:
            await ready(client)
            prompts = [
                tuple(dice.randrange(1000, 40000) for _ in range(dice.randint(1, 400)))
                for _ in range(16)
            ]
            expected = {prompt: await ask(client, prompt, None) for prompt in prompts}
            ends: Counter[str] = Counter()
            began = time.monotonic()
            until = began + soak_s
            loads = [
                asyncio.create_task(load(client, random.Random(n), expected, until, ends))
                for n in range(CLIENTS)
            ]
            settled: dict[str, int] = {}
            while time.monotonic() < until:
                await asyncio.sleep(min(KILL_EVERY_S, soak_s / 4))
                if not settled and time.monotonic() - began > SETTLED_SHARE * soak_s:
                    settled = processes.memory()
                victim = dice.randrange(2)
                processes.kill(f"prefill-{victim}")
                await asyncio.sleep(2)
                processes.start(f"prefill-{victim}", "prefill", "--replica", str(victim))
            await asyncio.gather(*loads)
            async with asyncio.timeout(60):  # quarantined pages come back when writers are dead
                while any(node.used_pages for node in (await client.status()).nodes):
                    pass
            grown = processes.memory()
    except TknpError as error:
        raise AssertionError(f"the pool broke, logs are in {tmp_path}: {error}") from error
    finally:
        processes.stop()
    print(f"\n{dict(ends)}; resident bytes {settled} -> {grown}")
    assert ends["complete"] > 0
    for name in ("coordinator", "node-0", "node-1"):
        assert grown[name] <= MEMORY_GROWTH * settled[name], f"{name} grows"
