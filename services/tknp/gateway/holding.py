"""New requests while no pool of their model takes any wait, as many and as long as is allowed.

    pick -> a pool takes requests                        there
         -> none does, fewer than `most` wait            until one does, `longest_s` at most
         -> none does, and there is no place or time     Unavailable, with what the pools said last
         -> as many of its key wait or run as may        CapacityError
         -> its own deadline passes meanwhile            DeadlineExceeded

A pool that restarts (an update, a lost node) is away for as long as it loads weights. Whoever asks
meanwhile has an answer later instead of an error at once. Streams that had begun at the pool wait
too, but hold no place here: they have been let in already.
"""

from __future__ import annotations

from collections import Counter

from tknp.errors import Unavailable
from tknp.gateway.keys import Tenant
from tknp.gateway.ledger import Use
from tknp.gateway.pools import Pools, Upstream


class Holding:
    """Of one replica. `longest_s` 0: nobody waits."""

    def __init__(self, pools: Pools, most: int, longest_s: float) -> None:
        self._pools = pools
        self._most, self._longest_s = most, longest_s
        self._of: Counter[Tenant] = Counter()

    @property
    def waiting(self) -> int:
        """Requests that hold a place now."""
        return self._of.total()

    @property
    def open(self) -> bool:
        """Whether a request that comes now is taken: a pool is there, or was a short while ago."""
        return self._pools.ready or self._pools.away_s < self._longest_s

    async def pick(self, model: str, tenant: Tenant, deadline_s: float = float("inf")) -> Upstream:
        """The pool of `model` to ask, once there is one; nobody waits beyond `deadline_s`, on the
        clock of `time.monotonic`.

        Raises Unavailable, CapacityError where `tenant` has as many requests as it may, or
        UnknownModel at once where no pool serves it.
        """
        try:
            return self._pools.pick(model)
        except Unavailable as error:
            if self._longest_s <= 0:
                raise
            if self.waiting >= self._most:
                raise Unavailable(f"{self.waiting} requests wait already: {error}") from error
        held, one = tenant.used + Use(self._of[tenant]), Use(1)
        if not tenant.limit.has_room(held, one):
            tenant.refuse(held, one)
        self._of[tenant] += 1
        try:
            return await self._pools.wait(model, self._longest_s, deadline_s)
        finally:
            self._of[tenant] -= 1
