"""What every replica of a gateway has in flight for each key that has limits.

    replica --- claim: what it has now, and what it would add ---> Ledger: added, if all of it fits
    replica --- claim: what it has now (an end, every 5 s) ------> Ledger: noted

A claim says the whole of what a replica has for a key, so the ledger holds nothing that it can't be
told again: one that was lost and starts anew knows all within a renewal. A replica that is silent
for a lease is taken for dead, and what it had counts no more. Claims of one replica and key are
numbered; one that comes late is out of date and ignored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

LEASE_S = 30.0


@dataclass(frozen=True, slots=True)
class Use:
    """Requests in flight and the tokens that they may take, prompts plus longest outputs."""

    requests: int = 0
    tokens: int = 0

    def __add__(self, other: Use) -> Use:
        return Use(self.requests + other.requests, self.tokens + other.tokens)

    def __sub__(self, other: Use) -> Use:
        return Use(self.requests - other.requests, self.tokens - other.tokens)


@dataclass(frozen=True, slots=True)
class Limit:
    """The most that may be in flight; None: any number."""

    requests: int | None = None
    tokens: int | None = None

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self.requests is not None or self.tokens is not None

    def has_room(self, held: Use, more: Use) -> bool:
        """Whether `more` may be added to `held`."""
        whole = held + more
        return (self.requests is None or whole.requests <= self.requests) and (
            self.tokens is None or whole.tokens <= self.tokens
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """What `replica` has in flight for the key called `name`; `number` rises with each claim."""

    replica: str
    name: str
    number: int
    used: Use


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether what was asked for is added. `held`: by all replicas, without it."""

    added: bool
    held: Use


class Ledger:
    """The counts, with the time of each claim by `clock`."""

    def __init__(
        self, lease_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._lease_s, self._clock = lease_s, clock
        self._claims: dict[str, dict[str, tuple[Claim, float]]] = {}  # by name, then by replica

    def note(self, claim: Claim) -> None:
        """What a replica has now."""
        of_name = self._claims.setdefault(claim.name, {})
        known = of_name.get(claim.replica)
        if known is None or known[0].number < claim.number:
            of_name[claim.replica] = claim, self._clock()

    def ask(self, claim: Claim, more: Use, limit: Limit) -> Answer:
        """Note `claim`, and add `more` to it where `limit` allows that."""
        self.note(claim)
        held = self._held(claim.name)
        if not limit.has_room(held, more):
            return Answer(False, held)
        of_name = self._claims[claim.name]
        if claim.replica in of_name and of_name[claim.replica][0] is claim:  # it is not late
            raised = Claim(claim.replica, claim.name, claim.number, claim.used + more)
            of_name[claim.replica] = raised, self._clock()
        return Answer(True, held)

    def _held(self, name: str) -> Use:
        """By the replicas that live; the others are forgotten."""
        oldest_s = self._clock() - self._lease_s
        living = {r: (c, at_s) for r, (c, at_s) in self._claims[name].items() if at_s >= oldest_s}
        self._claims[name] = living
        return sum((claim.used for claim, _ in living.values()), Use())
