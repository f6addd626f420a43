"""The limits of keys, at one replica.

    Limits         the only replica, or a key without limits: what is counted here
    SharedLimits   one of several: Ledger.ask before a request, Ledger.note after it and every 5 s

Claims of a key go one at a time, so that they arrive in order. While the ledger doesn't answer (its
process starts anew) each replica holds the limits by its own counts; what it could not tell is told
with the next renewal.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from tknp.gateway.keys import Tenant
from tknp.gateway.ledger import LEASE_S, Answer, Claim, Limit, Use

log = logging.getLogger(__name__)
T = TypeVar("T")
_RENEW_S = LEASE_S / 6
_ANSWER_S = 2.0
# An end at another replica may be on its way: what has room here, but not with the others, is asked
# for once more after this.
_GRACE_S = 0.05


class SharedLedger(Protocol):
    """A `Ledger` in another process. Whatever it raises means that it can't be asked now."""

    async def ask(self, claim: Claim, more: Use, limit: Limit) -> Answer: ...

    async def note(self, claim: Claim) -> None: ...


class Limits:
    """Of the only replica."""

    def start(self) -> None:
        """There is a running event loop."""

    async def close(self) -> None:
        """No request comes any more."""

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: Tenant, more: Use) -> AsyncIterator[None]:
        """`more` is in flight for as long as the context lasts.

        Raises CapacityError where there is no room now, InvalidValue where there never is.
        """
        if not tenant.limit.has_room(tenant.used, more):
            tenant.refuse(tenant.used, more)
        tenant.used += more
        try:
            yield
        finally:
            tenant.used -= more


class SharedLimits(Limits):
    """Of `tenants`, at one of the replicas that share `ledger`."""

    def __init__(
        self, tenants: Sequence[Tenant], ledger: SharedLedger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._tenants = [tenant for tenant in tenants if tenant.limit]
        self._ledger, self._clock = ledger, clock
        self._replica = uuid.uuid4().hex
        self._number = 0
        self._turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._owed: set[str] = set()  # names of keys whose last claim may not have arrived
        self._silent_until_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        if self._tenants:
            self._beside(self._renew())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def admitted(self, tenant: Tenant, more: Use) -> AsyncIterator[None]:
        if not tenant.limit:
            async with super().admitted(tenant, more):
                yield
            return
        await self._admit(tenant, more)
        try:
            yield
        finally:
            tenant.used -= more
            self._beside(self._note(tenant))

    async def renew(self) -> None:
        """Tell what is in flight, and what could not be told."""
        for tenant in self._tenants:
            if tenant.used.requests or tenant.name in self._owed:
                await self._note(tenant)

    async def _admit(self, tenant: Tenant, more: Use) -> None:
        for wait_s in (0.0, _GRACE_S):
            await asyncio.sleep(wait_s)  # out of turn: others of the key go on meanwhile
            if not tenant.limit.has_room(tenant.used, more):
                tenant.refuse(tenant.used, more)
            async with self._turn[tenant.name]:
                answer = await self._ask(tenant, more)
                if answer.added:
                    tenant.used += more
                    return
        tenant.refuse(answer.held, more)

    async def _ask(self, tenant: Tenant, more: Use) -> Answer:
        claim = self._claim(tenant)
        answer = await self._answered(tenant, lambda: self._ledger.ask(claim, more, tenant.limit))
        if answer is None:
            return Answer(tenant.limit.has_room(tenant.used, more), tenant.used)
        return answer

    async def _note(self, tenant: Tenant) -> None:
        async with self._turn[tenant.name]:
            claim = self._claim(tenant)
            await self._answered(tenant, lambda: self._ledger.note(claim))

    async def _answered(self, tenant: Tenant, call: Callable[[], Awaitable[T]]) -> T | None:
        """What the ledger says; None while it says nothing."""
        self._owed.add(tenant.name)  # also if this is cancelled: the claim may have arrived
        if self._clock() < self._silent_until_s:
            return None
        try:
            async with asyncio.timeout(_ANSWER_S):
                answer = await call()
        except Exception as error:
            log.warning("limits of keys are held by this replica alone: %r", error)
            self._silent_until_s = self._clock() + _RENEW_S
            return None
        self._owed.discard(tenant.name)
        return answer

    def _claim(self, tenant: Tenant) -> Claim:
        self._number += 1
        return Claim(self._replica, tenant.name, self._number, tenant.used)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(_RENEW_S)
            await self.renew()

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
