"""Requests that wait for a pool: how many, how long, and what is said meanwhile."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tknp.errors import CapacityError, DeadlineExceeded, InvalidValue, Unavailable
from tknp.gateway.gateway import Gateway
from tknp.gateway.holding import Holding
from tknp.gateway.keys import Tenant
from tknp.gateway.ledger import Limit, Use
from tknp.gateway.pools import Pools, UnknownModel
from tknp.gateway.settings import GatewaySettings
from tknp.v1.coordinator_pb2 import Status
from tknp.v1.inference_pb2 import GetModelResponse

ANYBODY = Tenant("anybody")


class Told:
    """A client of a pool that is as the test says."""

    def __init__(self) -> None:
        self.up, self.longest = True, 64

    async def status(self, timeout_s: float) -> Status:
        if not self.up:
            raise Unavailable("nobody answers")
        return Status(ready=True)

    async def model(self, timeout_s: float) -> GetModelResponse:
        return GetModelResponse(name="m", max_model_len=self.longest)

    async def tokenize(self, text: str, timeout_s: float, add_special_tokens: bool) -> list[int]:
        assert timeout_s <= 0.02
        raise Unavailable("the connection was lost")

    async def close(self) -> None:
        pass


@pytest.fixture
def client() -> Told:
    return Told()


@pytest.fixture
async def world(client: Told) -> Any:
    clock = SimpleNamespace(s=100.0)
    connect: Any = lambda _: client  # noqa: E731
    pools = Pools(("a:1",), connect, lambda: clock.s)
    await pools.start()
    yield SimpleNamespace(pools=pools, clock=clock)
    await pools.close()


async def waiters(holding: Holding, count: int) -> None:
    async with asyncio.timeout(60):
        while holding.waiting != count:  # noqa: ASYNC110 - nobody tells when this changes
            await asyncio.sleep(0)


async def test_a_request_waits_until_its_pool_is_back(world: Any, client: Told) -> None:
    holding = Holding(world.pools, most=2, longest_s=3600)
    assert (await holding.pick("m", ANYBODY)).target == "a:1"
    client.up = False
    await world.pools.looked()
    held = [asyncio.create_task(holding.pick("m", ANYBODY)) for _ in range(2)]
    await waiters(holding, 2)
    with pytest.raises(Unavailable, match=r"2 requests wait already: .*nobody answers"):
        await holding.pick("m", ANYBODY)
    held.pop().cancel()  # its client has gone: there is a place again
    await waiters(holding, 1)
    held.append(asyncio.create_task(holding.pick("m", ANYBODY)))
    await waiters(holding, 2)
    client.up, client.longest = True, 128
    assert [upstream.target for upstream in await asyncio.gather(*held)] == ["a:1", "a:1"]
    assert holding.waiting == 0
    assert world.pools.model("m").max_model_len == 128  # of the pool that has come back


async def test_nobody_waits_longer_than_allowed(world: Any, client: Told) -> None:
    client.up = False
    await world.pools.looked()
    for holding in (Holding(world.pools, 9, 0), Holding(world.pools, 9, 0.01)):
        with pytest.raises(Unavailable, match="nobody answers"):
            await holding.pick("m", ANYBODY)
        assert holding.waiting == 0


async def test_nobody_waits_beyond_the_deadline_of_the_request(client: Told) -> None:
    """For a pool that is away, or for one that breaks whenever it is asked for ids."""
    told: Any = client
    gateway = Gateway(GatewaySettings(pools=("a:1",), hold_s=3600, timeout_s=60), lambda _: told)
    tenant = gateway.keys.tenant(None)
    await gateway.start()
    async with asyncio.timeout(60):
        with pytest.raises(DeadlineExceeded, match="time was up"):
            await gateway.encode("m", "ab", tenant, gateway.deadline_s(0.02))
        client.up = False
        await gateway.pools.looked()
        with pytest.raises(DeadlineExceeded, match=r"time was up: .*nobody answers"):
            await gateway.encode("m", "ab", tenant, gateway.deadline_s(0.02))
    assert gateway.deadline_s(3600) <= gateway.deadline_s()
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InvalidValue, match="timeout_s"):
            gateway.deadline_s(wrong)
    await gateway.close()


async def test_a_key_waits_with_as_many_as_it_may_have(world: Any, client: Told) -> None:
    holding, key = Holding(world.pools, 9, 3600), Tenant("a", limit=Limit(requests=2))
    client.up = False
    await world.pools.looked()
    key.used = Use(1, 5)
    held = asyncio.create_task(holding.pick("m", key))
    await waiters(holding, 1)
    with pytest.raises(CapacityError, match="2 requests of 5 tokens of a are in flight"):
        await holding.pick("m", key)
    others = asyncio.create_task(holding.pick("m", ANYBODY))
    await waiters(holding, 2)
    client.up = True
    await asyncio.gather(held, others)
    assert holding.waiting == 0


async def test_a_model_that_nobody_serves_is_refused_at_once(world: Any) -> None:
    with pytest.raises(UnknownModel):
        await Holding(world.pools, 9, 3600).pick("other", ANYBODY)


async def test_it_is_open_until_a_pool_has_been_away_too_long(world: Any, client: Told) -> None:
    holding, closed = Holding(world.pools, 9, 60), Holding(world.pools, 9, 0)
    assert holding.open
    client.up = False
    await world.pools.looked()
    assert holding.open
    assert not closed.open
    world.clock.s += 61
    assert not holding.open
    client.up = True
    await world.pools.looked()
    assert holding.open


async def test_a_gateway_that_has_seen_no_pool_is_not_open() -> None:
    silent = Told()
    silent.up = False
    connect: Any = lambda _: silent  # noqa: E731
    pools = Pools(("a:1",), connect)
    await pools.start()
    assert not Holding(pools, 9, 3600).open
    await pools.close()
