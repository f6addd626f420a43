"""`tknp up` with real processes that are killed and stopped: what clients, peers and the user see.

The whole table of process kinds and phases is in `faults/`, with ranks as threads, but for
the phase of loading, which is here; a writer that is stopped in mid-push is in
`test_quarantine.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tknp.client import Client, RequestFailed, request_for
from tknp.errors import TknpError
from tknp.v1.common_pb2 import Sampling

NOTICED_S = 10.0
Start = Callable[..., "Up"]
pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(300)]


def gone(pid: int) -> bool:
    """Whether `pid` has ended, or is a zombie that only its parent's wait keeps."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Up:
    """One `tknp up` and the processes under it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.target = ""
        self.pids: dict[str, int] = {}

    def ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(self.process.communicate()[1])
        facts: dict[str, Any] = json.loads(line)
        self.target, self.pids = facts["target"], facts["pids"]

    def loading(self, role: str, rank: int) -> int:
        """The process of TP rank `rank` of `role`, waited for until it has been started."""
        words = {"serve", role} if role == "coordinator" else {"serve", role, "--rank", str(rank)}
        while self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if words <= set(child.cmdline()):
                        return child.pid
            time.sleep(0.01)
        pytest.fail(self.process.communicate()[1])

    def ended(self) -> str:
        """What it reports when it has ended by itself, leaving no process."""
        _, errors = self.process.communicate()
        assert self.process.returncode == 1, errors
        assert all(gone(pid) for pid in self.pids.values())
        return errors

    async def broken_by(self, signum: int, name: str) -> str:
        """Send `signum` to `name` while a request decodes; how the request ends."""
        async with Client(self.target) as client:
            sampling = Sampling(max_tokens=4000, ignore_eos=True)
            responses = client.generate(request_for([1, 2, 3], sampling))
            while not (await anext(responses)).token_ids:
                continue
            os.kill(self.pids[name], signum)
            with pytest.raises((RequestFailed, TknpError)) as caught:
                await asyncio.wait_for(_rest(responses), NOTICED_S)
            return str(caught.value)


async def _rest(responses: AsyncIterator[Any]) -> None:
    async for _ in responses:
        continue


@pytest.fixture
def up(tmp_path: Path, random_checkpoint: Callable[..., Path]) -> Iterator[Start]:
    """Starts `tknp up --json` with a small model; whatever a test leaves is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> Up:
        model = str(random_checkpoint(max_position=4096))
        argv = [sys.executable, "-m", "tknp.cli.main", "up", "--json", "--port", "0",
                "--model", model, *arguments]  # fmt: skip
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        started.append(
            subprocess.Popen(
                argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
            )
        )
        return Up(started[-1])

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def test_decode_node_killed_while_decoding(up: Start) -> None:
    pool = up("--nodes", "2", "--kv-memory", "64MiB")
    pool.ready()
    assert "decode node" in await pool.broken_by(signal.SIGKILL, "decode-node-1")
    assert "decode-node-1 was killed by SIGKILL" in pool.ended()


async def test_decode_node_stopped_while_decoding(up: Start) -> None:
    """Its kernel still answers for it: connections stay open, and the data plane just waits."""
    pool = up("--nodes", "2", "--kv-memory", "64MiB")
    pool.ready()
    await pool.broken_by(signal.SIGSTOP, "decode-node-1")
    errors = pool.ended()
    assert "decode-node-1 has been stopped" in errors or "decode node 1" in errors


async def test_prefill_killed_in_a_prompt(up: Start) -> None:
    pool = up("--nodes", "1", "--kv-memory", "64MiB")
    pool.ready()
    prefill = psutil.Process(pool.pids["prefill-0"])
    prefill.suspend()  # so that the prompt is under way for as long as it takes
    async with Client(pool.target) as client:
        request = request_for([1, 2, 3], Sampling(max_tokens=4))
        responses = client.generate(request)
        accepted = await anext(responses)
        assert accepted.accepted.prompt_tokens == 3
        prefill.kill()
        with pytest.raises((RequestFailed, TknpError), match="prefill 0"):
            await asyncio.wait_for(_rest(responses), NOTICED_S)
    assert "prefill-0 was killed by SIGKILL" in pool.ended()


async def test_coordinator_killed_while_decoding(up: Start) -> None:
    pool = up("--nodes", "1", "--kv-memory", "64MiB")
    pool.ready()
    await pool.broken_by(signal.SIGKILL, "coordinator")
    assert "coordinator was killed by SIGKILL" in pool.ended()


def test_too_little_memory_is_an_error_with_numbers(up: Start) -> None:
    pool = up("--nodes", "1", "--kv-memory", "1024TiB")
    errors = pool.ended()
    assert "KV pages need 11258999" in errors
    assert "are available" in errors


@pytest.mark.full
@pytest.mark.parametrize("name", ["coordinator", "prefill-0", "decode-node-1"])
def test_a_process_stopped_while_idle_is_named(up: Start, name: str) -> None:
    pool = up("--nodes", "2", "--kv-memory", "64MiB")
    pool.ready()
    os.kill(pool.pids[name], signal.SIGSTOP)
    assert f"{name} has been stopped (SIGSTOP) for 3 s" in pool.ended()


@pytest.mark.full
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("role", "rank"),
    [("coordinator", 0), ("prefill", 0), ("prefill", 1), ("decode-node", 0), ("decode-node", 1)],
)
def test_a_process_lost_while_loading_is_named(
    up: Start, role: str, rank: int, signum: signal.Signals, tmp_path: Path
) -> None:
    pool = up("--nodes", "1", "--tp", "2", "--prefill-tp", "2", "--kv-memory", "64MiB")
    os.kill(pool.loading(role, rank), signum)
    name = role if role == "coordinator" else f"{role}-0-rank-{rank}"
    how = "was killed by SIGKILL" if signum == signal.SIGKILL else "has been stopped (SIGSTOP)"
    assert f"{name} {how}" in pool.ended()
    ours = (p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"]))
    assert not [words for words in ours if any(str(tmp_path) in word for word in words)]
