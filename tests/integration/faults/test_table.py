"""The whole table of kinds of process, ways to go and phases."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tknp.client import Client, RequestFailed
from tknp.config import write_pool
from tknp.errors import TknpError
from tknp.v1.common_pb2 import Phase

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]

KINDS = ("coordinator", "prefill", "decode node", "decode TP rank", "prefill TP rank")
PHASES = ("idle", "prefill", "transfer", "decode", "draining")
CELLS = [
    pytest.param(kind, how, phase, marks=pytest.mark.full, id=f"{kind}-{how}-{phase}")
    for kind in KINDS
    for how in ("killed", "frozen")
    for phase in PHASES
    if (kind, how) != ("coordinator", "frozen")  # in a test of its own
]


async def enter(scene: Any, phase: str, client: Client) -> asyncio.Task[None]:
    """Bring a request of `scene` into `phase`, the batch if that is draining."""
    prefill = scene.running.prefill[0]
    block, reached, go_on = scene.block(), asyncio.Event(), asyncio.Event()
    if phase == "idle":
        return asyncio.create_task(asyncio.sleep(0))
    if phase == "prefill":
        scene.in_layer(prefill, block)
    if phase == "transfer":
        scene.in_finish(prefill, reached, go_on)
    work = asyncio.create_task(scene.generate(client, max_tokens=400))
    waits = {"prefill": block.reached, "transfer": reached}
    await waits.get(phase, scene.got_tokens).wait()
    # What is held up goes on by itself a moment after: the process that was hit must not matter.
    asyncio.get_running_loop().call_later(0.2, block.release)
    asyncio.get_running_loop().call_later(0.2, go_on.set)
    return work


async def look_around(scene: Any) -> None:
    """What passes while time does: looks are taken, and processes that have failed end."""
    scene.clock.skipped_s += 4 * scene.pool.config.timeout_s
    for service in (*scene.running.nodes, *scene.running.prefill):
        if service not in scene.killed:
            await service.look()
            if service.runtime.life.error:
                await scene.kill(service)
    if scene.running.coordinator not in scene.killed:
        await scene.driver.look()


@pytest.mark.parametrize(("kind", "how", "phase"), CELLS)
async def test_table(scene: Any, kind: str, how: str, phase: str) -> None:
    """Whatever is hit, and when: every request ends, the pool ends or its pages are free."""
    settings = {"tp": 1 + (kind == "decode TP rank"), "prefill_tp": 1 + (kind == "prefill TP rank")}
    async with scene(nodes=2, **settings) as (pool, client):
        victim: Any = {
            "coordinator": pool.running.coordinator,
            "prefill": pool.running.prefill[0],
            "decode node": pool.running.nodes[-1],
            "decode TP rank": pool.running.nodes[-1],
            "prefill TP rank": pool.running.prefill[-1],
        }[kind]
        work, others = await enter(pool, phase, client), []
        if phase == "draining":
            others.append(asyncio.create_task(pool.running.coordinator.drain()))
            await pool.until(lambda: pool.driver.phase == Phase.PHASE_DRAINING)
        if kind == "coordinator":
            pool.driver.serving.close()
        if how == "killed":
            await pool.kill(victim)
        else:
            pool.freeze(victim)
        if kind == "coordinator":
            await pool.driver.peers.close()
        if phase == "idle":
            work = asyncio.create_task(pool.generate(client, max_tokens=400))
        async with asyncio.timeout(3 * pool.NOTICED_S):
            while not work.done():
                await asyncio.wait([work], timeout=0.5)
                await look_around(pool)
            await asyncio.gather(*others)
        error = work.exception()
        assert error is None or isinstance(error, RequestFailed | TknpError)
        assert error is not None or kind.startswith("prefill"), "the pool can't go on without it"
        computing = phase in ("idle", "prefill") or (phase == "transfer" and how == "killed")
        if kind.startswith("prefill") and computing:
            assert error is not None
            assert not pool.driver.error
        if not pool.driver.error and kind != "coordinator":
            await pool.pages_return(*pool.running.nodes[:: settings["tp"]])


@pytest.mark.full
@pytest.mark.parametrize("phase", PHASES)
async def test_table_of_a_coordinator_that_is_stopped(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path], tmp_path: Path,
    make_scene: Any, phase: str,
) -> None:  # fmt: skip
    """Requests end within the keepalive's time; nodes that run some end too, pages come back."""
    scene = make_scene(make_pool(random_checkpoint(), **make_scene.SETTINGS))
    write_pool(scene.pool.config, tmp_path / "pool.yaml")
    command = ("-m", "tknp.cli.main", "serve", "coordinator", "--pool", tmp_path / "pool.yaml")
    coordinator = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        for rank in (*scene.running.prefill, *scene.running.nodes):
            await rank.start()
        async with Client(scene.pool.config.coordinator) as client:
            await served(client)
            work = await enter(scene, phase, client)
            if phase == "draining":
                coordinator.send_signal(signal.SIGTERM)
                while (await client.status()).phase != Phase.PHASE_DRAINING:
                    pass
            coordinator.send_signal(signal.SIGSTOP)
            if phase == "idle":
                work = asyncio.create_task(scene.generate(client))
            await scene.refused(work)
        nodes = scene.running.nodes
        if phase in ("decode", "draining"):
            for node in nodes:
                async with asyncio.timeout(scene.NOTICED_S):
                    assert "coordinator" in await node.runtime.life.failed()
        else:
            scene.clock.skipped_s += scene.pool.config.lease_s + 1
            await scene.pages_return(*nodes)
    finally:
        for block in scene.blocks:
            block.release()
        coordinator.kill()
        await coordinator.wait()
        await scene.running.stop()


async def served(client: Client) -> None:
    """Wait until the pool is ready."""
    while True:
        with suppress(TknpError):
            if (await client.status()).ready:
                return
        await asyncio.sleep(0.1)
