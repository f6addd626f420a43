from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from tknp.cli.readiness import Bars, Lines, missing, wait_until_ready
from tknp.client import Client
from tknp.errors import DeadlineExceeded, Unavailable
from tknp.v1 import common_pb2
from tknp.v1.common_pb2 import Progress


def text_of(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.fixture
def log() -> Console:
    return Console(file=StringIO(), width=80)


@pytest.fixture
def terminal() -> Console:
    return Console(file=StringIO(), width=80, force_terminal=True)


async def test_a_ready_pool_returns_its_status(fake_pool: Any, log: Console) -> None:
    async with Client(fake_pool.target) as client:
        status = await wait_until_ready(client, log, 20)
    assert status.model == "tiny"
    assert text_of(log).splitlines() == ["prefill 0: ready", "node 0: ready", "node 1: ready"]


async def test_a_failed_start_gives_the_reason(fake_pool: Any, log: Console) -> None:
    fake_pool.status.ready = False
    fake_pool.status.phase = common_pb2.PHASE_FAILED
    fake_pool.status.nodes[1].progress.error = "no such tensor"
    async with Client(fake_pool.target) as client:
        with pytest.raises(Unavailable, match="failed to start: node 1: no such tensor"):
            await wait_until_ready(client, log, 20)


async def test_a_late_pool_is_given_up_and_who_is_missing_named(
    fake_pool: Any, terminal: Console
) -> None:
    fake_pool.status.ready = False
    fake_pool.status.nodes[1].progress.CopyFrom(
        Progress(phase=common_pb2.PHASE_LOADING, loaded_bytes=2**20, total_bytes=2**21)
    )
    async with Client(fake_pool.target) as client:
        with pytest.raises(DeadlineExceeded, match="node 1 is loading weights; allow more"):
            await wait_until_ready(client, terminal, 0.5)
    assert "1.0 MiB of 2.0 MiB" in text_of(terminal)


async def test_an_absent_coordinator_is_named(free_port: int, log: Console) -> None:
    async with Client(f"127.0.0.1:{free_port}") as client:
        with pytest.raises(DeadlineExceeded, match="the coordinator does not answer"):
            await wait_until_ready(client, log, 0.2)


def test_each_phase_is_one_line(fake_pool: Any, log: Console) -> None:
    lines = Lines(log)
    status = fake_pool.status
    del status.prefill[:], status.nodes[1:]
    for phase in (common_pb2.PHASE_LOADING, common_pb2.PHASE_LOADING, common_pb2.PHASE_WARMING):
        status.nodes[0].progress.phase = phase
        lines.update(status)
    assert text_of(log).splitlines() == ["node 0: loading weights, 7 B", "node 0: warming up"]


def test_bars_survive_services_without_sizes(fake_pool: Any, terminal: Console) -> None:
    fake_pool.status.nodes[0].progress.CopyFrom(Progress(phase=common_pb2.PHASE_READY))
    fake_pool.status.nodes[1].ClearField("progress")
    with Bars(terminal) as _:
        pass
    bars = Bars(terminal)
    with bars:
        bars.update(fake_pool.status)
    assert "node 0" in text_of(terminal)
    assert missing(fake_pool.status) == "node 1 is starting"
