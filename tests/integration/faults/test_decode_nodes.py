"""Decode nodes and their TP ranks, killed and frozen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tknp.v1.common_pb2 import Phase

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]


@pytest.mark.parametrize("node", [0, 1])
async def test_decode_node_killed_while_decoding(scene: Any, node: int) -> None:
    """Its peer may notice first, by the data plane, or the coordinator, by the step stream."""
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.kill(pool.running.nodes[node])
        why = rf"rank \({node}, 0\)|decode node {node}"
        await pool.refused(work, why)
        await pool.failed(why)
        await pool.refused(asyncio.create_task(pool.generate(client)), why)
        survivor = pool.running.nodes[1 - node].runtime
        async with asyncio.timeout(pool.NOTICED_S):
            assert await survivor.life.failed()


async def test_decode_node_killed_while_idle(scene: Any) -> None:
    async with scene() as (pool, client):
        await pool.kill(pool.running.nodes[1])
        await pool.failed("decode node 1")
        await pool.refused(asyncio.create_task(pool.generate(client)), "decode node 1")


@pytest.mark.parametrize("node", [0, 1])
async def test_decode_node_frozen_while_decoding(scene: Any, node: int) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        pool.freeze(pool.running.nodes[node])
        await pool.refused(work, rf"\({node}, 0\) not done after 2.0 s")
        await pool.failed(rf"\({node}, 0\) not done")


async def test_decode_node_frozen_while_idle_is_noticed_by_the_next_request(scene: Any) -> None:
    async with scene() as (pool, client):
        await pool.freeze(pool.running.nodes[1]).reached.wait()
        await pool.refused(asyncio.create_task(pool.generate(client)), "not done after 2.0 s")
        await pool.failed(r"\(1, 0\)")


async def test_the_only_decode_node_frozen_is_found_by_its_own_clock(scene: Any) -> None:
    """No peer waits for it on the data plane, and its port answers: only progress tells."""
    async with scene(nodes=1) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.freeze(pool.running.nodes[0]).reached.wait()
        node = pool.running.nodes[0]
        await node.look()
        pool.clock.skipped_s += 100
        await node.look()
        assert "no progress" in node.runtime.life.error
        await pool.driver.look()
        await pool.failed("hangs")
        await pool.refused(work, "hangs")


async def test_a_tp_rank_killed_while_decoding(scene: Any) -> None:
    async with scene(nodes=1, tp=2) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.kill(pool.running.nodes[1])
        await pool.refused(work, r"rank \(0, 1\)|TP rank 1|decode node 0")
        await pool.failed(r"rank \(0, 1\)|TP rank 1|decode node 0")


@pytest.mark.full
async def test_a_tp_rank_frozen_while_decoding(scene: Any) -> None:
    async with scene(nodes=1, tp=2) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        pool.freeze(pool.running.nodes[1])
        await pool.refused(work, "not done after 2.0 s")


async def test_decode_node_killed_while_draining(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        draining = asyncio.create_task(pool.running.coordinator.drain())
        await pool.until(lambda: pool.driver.phase == Phase.PHASE_DRAINING)
        await pool.kill(pool.running.nodes[1])
        await pool.refused(work, r"rank \(1, 0\)|decode node 1")
        async with asyncio.timeout(pool.NOTICED_S):
            await draining


@pytest.mark.full
async def test_decode_node_frozen_while_draining(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        draining = asyncio.create_task(pool.running.coordinator.drain())
        pool.freeze(pool.running.nodes[1])
        await pool.refused(work, "not done after 2.0 s")
        async with asyncio.timeout(pool.NOTICED_S):
            await draining
