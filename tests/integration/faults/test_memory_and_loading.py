"""Ranks that die while they load, or find no memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tknp.errors import TknpError
from tknp.local import InProcessPool
from tknp.v1.common_pb2 import Phase

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]


async def test_a_rank_that_cannot_load_fails_the_start_with_its_reason(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> None:
    pool = make_pool(random_checkpoint(), nodes=2, kv_memory_bytes=1 << 50, page_size=16)
    with pytest.raises(TknpError, match=r"KV pages need \d+ bytes .* \d+ bytes .* available"):
        async with InProcessPool(pool):
            pass


async def test_a_chunk_that_finds_no_memory_ends_its_request_with_numbers(scene: Any) -> None:
    """As it is computed, a prompt takes memory that nobody has counted."""
    async with scene(nodes=1) as (pool, client):
        attention = pool.running.prefill[0].runtime.rank._attention
        attention.attend = too_much
        why = r"no memory to compute a chunk of 32 tokens, \d+ bytes .* 1152921504606846976"
        await pool.refused(asyncio.create_task(pool.generate(client)), why)
        del attention.attend
        await pool.generate(client, max_tokens=3)
        assert not pool.driver.error


async def test_a_step_that_finds_no_memory_ends_the_pool_with_the_reason(scene: Any) -> None:
    async with scene(nodes=1) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        state = pool.running.nodes[0].runtime._engine._lanes[0].state
        state._attention.attend = too_much
        await pool.refused(work, r"rank \(0, 0\), step \d+: .*1152921504606846976 bytes")
        await pool.failed("1152921504606846976 bytes")


def too_much(*_: Any) -> None:
    """What no machine has."""
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["nodes", "prefill"])
async def test_a_process_killed_while_loading_fails_the_start(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    make_scene: Any,
    kind: str,
) -> None:
    """Its port was open once, and is not any more."""
    pool = make_pool(random_checkpoint(), nodes=2, kv_memory_bytes=2 << 20, page_size=16)
    scene = make_scene(pool)
    running = scene.running
    victim = getattr(running, kind)[-1]
    never = threading.Event()
    victim.runtime._connect = lambda *_: never.wait()
    start = asyncio.create_task(running.__aenter__())
    peers = running.coordinator.driver.peers
    peer = (peers.nodes[-1] if kind == "nodes" else peers.prefill[-1])[0]
    try:
        await scene.until(lambda: peer.progress.phase == Phase.PHASE_JOINING)
        await victim._server.grpc.stop(None)
        await scene.until(lambda: bool(peer.lost))
        scene.clock.skipped_s += 100
        with pytest.raises(TknpError, match=rf"{peer.name}.*has not answered"):
            async with asyncio.timeout(scene.NOTICED_S):
                await start
    finally:
        never.set()
        start.cancel()
        with suppress(BaseException):
            await start
