"""Prefill replicas and their TP ranks, killed and frozen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]


async def test_prefill_killed_in_a_prompt_ends_that_request_and_frees_its_pages(scene: Any) -> None:
    async with scene() as (pool, client):
        block = pool.block()
        pool.in_layer(pool.running.prefill[0], block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        await pool.kill(pool.running.prefill[0])
        block.release()
        await pool.refused(work, "prefill 0")
        assert not pool.driver.error
        await pool.pages_return(*pool.running.nodes)
        await pool.refused(asyncio.create_task(pool.generate(client)), "prefill 0")


async def test_prefill_killed_in_a_transfer_frees_the_owner_s_pages(scene: Any) -> None:
    async with scene() as (pool, client):
        reached, go_on = asyncio.Event(), asyncio.Event()
        pool.in_finish(pool.running.prefill[0], reached, go_on)
        work = asyncio.create_task(pool.generate(client))
        await reached.wait()
        await pool.kill(pool.running.prefill[0])
        await pool.refused(work, "prefill 0")
        go_on.set()
        await pool.pages_return(*pool.running.nodes)


async def test_prefill_killed_while_idle_leaves_running_requests_alone(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.kill(pool.running.prefill[0])
        await work
        assert not pool.driver.error


async def test_prefill_frozen_in_a_prompt_is_found_by_its_own_clock(scene: Any) -> None:
    async with scene() as (pool, client):
        prefill = pool.running.prefill[0]
        block = pool.block()
        pool.in_layer(prefill, block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        await prefill.look()
        pool.clock.skipped_s += 100
        await prefill.look()
        assert "no progress" in prefill.runtime.life.error
        await pool.kill(prefill)  # as its process does, having failed
        await pool.refused(work, "prefill 0")
        block.release()
        await pool.pages_return(*pool.running.nodes)


async def test_a_prefill_tp_rank_killed_ends_the_replica(scene: Any) -> None:
    async with scene(prefill_tp=2) as (pool, client):
        block = pool.block()
        pool.in_layer(pool.running.prefill[0], block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        await pool.kill(pool.running.prefill[1])
        leader = pool.running.prefill[0].runtime
        assert "TP rank" in await leader.life.failed()
        block.release()
        await pool.refused(work)
        await pool.pages_return(*pool.running.nodes)


@pytest.mark.full
async def test_a_prefill_tp_rank_frozen_ends_the_replica(scene: Any) -> None:
    async with scene(prefill_tp=2) as (pool, client):
        pool.freeze(pool.running.prefill[1])
        await pool.refused(asyncio.create_task(pool.generate(client)), "not done after 2.0 s")
        assert "not done after 2.0 s" in await pool.running.prefill[0].runtime.life.failed()
