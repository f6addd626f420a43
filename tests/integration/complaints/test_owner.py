"""Complaints about pages and transfers, as one owner sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tknp.errors import CapacityError, ProtocolError
from tknp.kv.holding import Key, State
from tknp.transfer.nixl_agent import nixl_available

PAGE = 16
KEY = Key("r", 0)
needs_nixl = pytest.mark.skipif(bool(nixl_available()), reason=str(nixl_available()))
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@needs_nixl
async def test_01_late_writes_pages_stay_out_of_use_until_the_writer_is_done(
    make_owner: Any,
) -> None:
    owner = await make_owner("nixl")
    await owner.reserve()
    await owner.transfer("Begin")
    await owner.release()
    assert owner.counts == {State.FREE: 6, State.QUARANTINED: 3}
    with pytest.raises(CapacityError, match="3 quarantined"):
        await owner.reserve(Key("next", 0), 7 * PAGE)
    await owner.transfer("Abort")
    assert owner.counts == {State.FREE: 9}


async def test_01_late_writes_by_grpc_find_no_window(make_owner: Any) -> None:
    owner = await make_owner("grpc")
    pages = await owner.reserve()
    await owner.transfer("Begin")
    await owner.release()
    assert owner.counts == {State.FREE: 9}
    with pytest.raises(ProtocolError, match="no open transfer"):
        owner.runtime.windows.check(KEY, "w", pages)


async def test_02_leak_is_ended_by_the_lease_and_late_signals_change_nothing(
    make_owner: Any,
) -> None:
    owner = await make_owner("grpc")
    await owner.reserve()
    await owner.transfer("Begin")
    owner.clock.now_s = 31
    await owner.service.reap()
    assert owner.counts == {State.FREE: 9}
    await owner.transfer("Abort")
    await owner.release()
    for late in ("Complete", "Renew"):
        with pytest.raises(ProtocolError, match="unknown here"):
            await owner.transfer(late)
    assert owner.counts == {State.FREE: 9}


@pytest.mark.parametrize("field", ["version", "model", "dtype", "page_size", "kv_heads"])
async def test_03_reject_of_a_writer_that_does_not_fit_tells_it_and_keeps_nothing(
    make_owner: Any, field: str
) -> None:
    owner = await make_owner("grpc")
    await owner.reserve()
    other = type(owner.runtime.pool.compatibility)()
    other.CopyFrom(owner.runtime.pool.compatibility)
    setattr(other, field, 99 if isinstance(getattr(other, field), int) else "other")
    with pytest.raises(ProtocolError, match=f"{field} differs"):
        await owner.transfer("Begin", compatibility=other)
    assert owner.counts == {State.FREE: 6, State.RESERVED: 3}
    assert len(owner.runtime.windows) == 0
    await owner.release()
    assert owner.counts == {State.FREE: 9}


async def test_04_recycled_pages_are_refused_under_another_epoch_or_attempt(
    make_owner: Any,
) -> None:
    owner = await make_owner("grpc")
    await owner.reserve()
    await owner.transfer("Begin")
    for call in ("Begin", "Complete", "Renew"):
        with pytest.raises(ProtocolError, match="epoch 2 is not this node's 1"):
            await owner.transfer(call, epoch=2)
        with pytest.raises(ProtocolError, match="r/1 is unknown"):
            await owner.transfer(call, key=Key("r", 1))
    assert owner.counts == {State.FREE: 6, State.RECEIVING: 3}


async def test_07_reaping_needs_no_work(make_owner: Any) -> None:
    owner = await make_owner("grpc")
    await owner.reserve()
    owner.clock.now_s = 29.9
    await owner.service.reap()
    assert owner.counts == {State.FREE: 6, State.RESERVED: 3}
    owner.clock.now_s = 30
    ticking = asyncio.create_task(owner.service.tick())
    while True:
        if owner.counts == {State.FREE: 9}:
            break
        await asyncio.sleep(0.01)
    ticking.cancel()
