from __future__ import annotations

import asyncio

from tknp.rpc.lifecycle import Lifecycle
from tknp.v1.common_pb2 import Phase, Progress


def test_progress_says_how_far_loading_is() -> None:
    life = Lifecycle()
    life.loaded(3, 8)
    assert life.progress == Progress(phase=Phase.PHASE_LOADING, loaded_bytes=3, total_bytes=8)
    life.enter(Phase.PHASE_READY)
    assert life.progress.phase == Phase.PHASE_READY


def test_the_first_reason_stays_and_failure_is_final() -> None:
    life = Lifecycle()
    assert life.fail("no such tensor")
    assert not life.fail("a peer is gone")
    life.enter(Phase.PHASE_READY)  # what was under way when it failed ends later
    assert (life.phase, life.progress.error) == (Phase.PHASE_FAILED, "no such tensor")


async def test_whoever_waits_for_the_end_learns_why() -> None:
    life = Lifecycle()
    waiting = asyncio.create_task(life.failed())
    await asyncio.sleep(0)
    assert not waiting.done()
    life.fail("out of memory")
    assert await waiting == "out of memory"
