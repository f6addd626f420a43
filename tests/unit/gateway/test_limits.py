"""Limits of keys over several replicas: a ledger in this process, and a clock of the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tknp.errors import CapacityError, InvalidValue
from tknp.gateway.keys import Tenant
from tknp.gateway.ledger import LEASE_S, Answer, Claim, Ledger, Limit, Use
from tknp.gateway.limits import Limits, SharedLimits


class Shared:
    """A ledger that can be away. `heard`: claims that it got."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger, self.away = ledger, False
        self.heard: list[Claim] = []

    async def ask(self, claim: Claim, more: Use, limit: Limit) -> Answer:
        await self._arrive(claim)
        return self.ledger.ask(claim, more, limit)

    async def note(self, claim: Claim) -> None:
        await self._arrive(claim)
        self.ledger.note(claim)

    async def _arrive(self, claim: Claim) -> None:
        await asyncio.sleep(0)
        if self.away:
            raise ConnectionError("nobody there")
        self.heard.append(claim)


@pytest.fixture
def clock() -> SimpleNamespace:
    return SimpleNamespace(s=100.0)


@pytest.fixture
def shared(clock: SimpleNamespace) -> Shared:
    return Shared(Ledger(clock=lambda: clock.s))


@asynccontextmanager
async def replicas(
    shared: Shared, clock: SimpleNamespace, limit: Limit, count: int = 2
) -> AsyncIterator[list[tuple[SharedLimits, Tenant]]]:
    """Replicas with a tenant each, as each reads its own key file."""
    made = []
    for _ in range(count):
        tenant = Tenant("a", limit=limit)
        made.append((SharedLimits([tenant], shared, lambda: clock.s), tenant))
    yield made
    for limits, _ in made:
        await limits.close()


async def settled(until: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not until():  # noqa: ASYNC110 - nobody tells when this changes
            await asyncio.sleep(0)


def held(shared: Shared) -> Use:
    return shared.ledger.ask(Claim("-", "a", 0, Use()), Use(), Limit()).held


async def test_one_replica_counts_for_itself() -> None:
    limits, tenant = Limits(), Tenant("a", limit=Limit(2, 100))
    async with limits.admitted(tenant, Use(1, 60)):
        with pytest.raises(CapacityError, match="1 requests of 60 tokens of a are in flight"):
            async with limits.admitted(tenant, Use(1, 41)):
                pass
        async with limits.admitted(tenant, Use(1, 40)):
            with pytest.raises(CapacityError, match="max_requests=2"):
                async with limits.admitted(tenant, Use(1, 0)):
                    pass
    assert tenant.used == Use()


@pytest.mark.parametrize(("more", "field"), [(Use(3, 1), "n"), (Use(1, 101), "max_tokens")])
@pytest.mark.parametrize("several", [False, True])
async def test_what_can_never_be_had_is_refused_for_good(
    shared: Shared, clock: SimpleNamespace, more: Use, field: str, several: bool
) -> None:
    tenant = Tenant("a", limit=Limit(2, 100))
    limits = SharedLimits([tenant], shared, lambda: clock.s) if several else Limits()
    with pytest.raises(InvalidValue, match="a may have") as raised:
        async with limits.admitted(tenant, more):
            pass
    assert raised.value.field == field


async def test_all_replicas_together_have_what_one_may(
    shared: Shared, clock: SimpleNamespace
) -> None:
    """Whoever asks: at every moment the sum is within the limit, and all of it can be had."""
    async with (
        replicas(shared, clock, Limit(requests=3), count=3) as made,
        AsyncExitStack() as held,
    ):
        asked = [limits.admitted(tenant, Use(1, 5)) for limits, tenant in made for _ in range(3)]
        found = await asyncio.gather(
            *(held.enter_async_context(one) for one in asked), return_exceptions=True
        )
        refused = [error for error in found if error is not None]
        assert len(found) - len(refused) == 3
        assert all(isinstance(error, CapacityError) for error in refused)
        assert sum(tenant.used.requests for _, tenant in made) == 3


async def test_what_ends_at_one_replica_is_free_at_another(
    shared: Shared, clock: SimpleNamespace
) -> None:
    async with replicas(shared, clock, Limit(tokens=100)) as ((one, mine), (other, theirs)):
        for _ in range(4):
            async with one.admitted(mine, Use(1, 100)):
                pass
            async with other.admitted(theirs, Use(1, 100)):  # at once, as a client does
                with pytest.raises(CapacityError, match="100 tokens of a are in flight"):
                    async with one.admitted(mine, Use(1, 1)):
                        pass
        await settled(lambda: held(shared) == Use())


async def test_one_that_is_asked_for_once_more_keeps_nobody_waiting(
    shared: Shared, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has no room at its own replica is refused without asking the others."""
    monkeypatch.setattr("tknp.gateway.limits._GRACE_S", 3600.0)
    async with replicas(shared, clock, Limit(requests=1)) as ((one, mine), (other, theirs)):
        async with other.admitted(theirs, Use(1, 1)):
            waiting = asyncio.create_task(one.admitted(mine, Use(1, 1)).__aenter__())
            await settled(lambda: len(shared.heard) == 2)
        await settled(lambda: held(shared) == Use())
        async with asyncio.timeout(60), one.admitted(mine, Use(1, 1)):
            heard = len(shared.heard)
            with pytest.raises(CapacityError, match="1 requests of 1 tokens of a are in flight"):
                async with one.admitted(mine, Use(1, 1)):
                    pass
            assert len(shared.heard) == heard
        assert not waiting.done()
        waiting.cancel()


async def test_a_replica_that_dies_gives_back_its_share(
    shared: Shared, clock: SimpleNamespace
) -> None:
    async with replicas(shared, clock, Limit(requests=1)) as ((dead, mine), (other, theirs)):
        stream = dead.admitted(mine, Use(1, 1))
        await stream.__aenter__()  # and is never heard of again
        with pytest.raises(CapacityError):
            async with other.admitted(theirs, Use(1, 1)):
                pass
        clock.s += LEASE_S + 1
        async with other.admitted(theirs, Use(1, 1)):
            clock.s += LEASE_S - 1
            await other.renew()  # and one that lives keeps its own
            clock.s += LEASE_S - 1
            assert held(shared) == Use(1, 1)


async def test_a_ledger_that_starts_anew_is_told_all(
    shared: Shared, clock: SimpleNamespace
) -> None:
    async with (
        replicas(shared, clock, Limit(requests=1)) as ((one, mine), (other, theirs)),
        one.admitted(mine, Use(1, 7)),
    ):
        shared.ledger = Ledger(clock=lambda: clock.s)
        await one.renew()
        assert held(shared) == Use(1, 7)
        with pytest.raises(CapacityError):
            async with other.admitted(theirs, Use(1, 1)):
                pass


async def test_without_a_ledger_each_replica_holds_the_limits(
    shared: Shared, clock: SimpleNamespace
) -> None:
    async with replicas(shared, clock, Limit(requests=1)) as ((one, mine), (other, theirs)):
        shared.away = True
        async with one.admitted(mine, Use(1, 1)), other.admitted(theirs, Use(1, 1)):
            with pytest.raises(CapacityError):
                async with one.admitted(mine, Use(1, 1)):
                    pass
            shared.away = False
            assert not shared.heard
            clock.s += 6
            await one.renew()
            await other.renew()
            assert held(shared) == Use(2, 2)
        await settled(lambda: held(shared) == Use())


async def test_a_key_without_limits_asks_nobody(shared: Shared, clock: SimpleNamespace) -> None:
    async with (
        replicas(shared, clock, Limit()) as ((one, mine), _),
        one.admitted(mine, Use(1000, 10**9)),
    ):
        await one.renew()
    assert not shared.heard


def test_a_claim_that_comes_late_is_ignored() -> None:
    ledger = Ledger()
    ledger.note(Claim("r", "a", 2, Use(2, 2)))
    ledger.note(Claim("r", "a", 1, Use(9, 9)))
    late = ledger.ask(Claim("r", "a", 1, Use(9, 9)), Use(1, 1), Limit())
    assert late.held == Use(2, 2)
    seen: Any = ledger.ask(Claim("s", "a", 1, Use()), Use(), Limit())
    assert seen.held == Use(2, 2)
