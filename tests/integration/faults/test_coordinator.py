"""Coordinators that are killed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]


async def test_coordinator_killed_while_decoding_ends_streams_and_nodes(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        pool.driver.serving.close()  # its connections to the nodes
        await pool.kill(pool.running.coordinator)
        await pool.refused(work)
        for node in pool.running.nodes:
            async with asyncio.timeout(pool.NOTICED_S):
                assert "coordinator" in await node.runtime.life.failed()


async def test_coordinator_killed_in_a_prompt_leaves_no_page_taken(scene: Any) -> None:
    async with scene() as (pool, client):
        block = pool.block()
        pool.in_layer(pool.running.prefill[0], block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        pool.driver.serving.close()
        await pool.kill(pool.running.coordinator)
        await pool.driver.peers.close()
        block.release()
        await pool.refused(work)
        pool.clock.skipped_s += pool.pool.config.lease_s + 1
        await pool.pages_return(*pool.running.nodes)
