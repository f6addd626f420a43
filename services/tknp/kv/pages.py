"""Page bookkeeping of one node. Pure: no torch, no threads, the clock is passed in.

All TP ranks of a node share page ids, so one pool serves them. Page 0 is the dummy page: padding
rows write there, and it is never handed out.

A page has two holders, the request and a writer in flight, and is free only when both are done.
A one-sided write can't be recalled, so a lease that ends never frees a page that is being written:

                 reserve              begin(writer)           complete(writer)
          free ----------> reserved ----------------> receiving ----------------> live
           ^  release, expire  |  ^  abort, writer_gone  |                         |
           |<------------------+  +----------------------+                         |
           |                                             | release, expire         |
           |     abort, late complete, writer_gone       v                         |
           |<--------------------------------------- quarantined                   |
           |                                                                       |
           |<----------------------------------------------------------------------+
                    release; expire unless admitted

    settle      reserved -> live without a writer: nobody is going to send anything
    admit       a live holding joins the running batch: it has no lease any more
    extend      a live holding grows
    renew       a lease not yet admitted is prolonged

Calls that a retry or a late peer may repeat are harmless: release, abort, writer_gone, renew after
admission, and begin, complete and admit by the same party. Everything else that doesn't fit the
diagram raises ProtocolError naming key and state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tknp.errors import CapacityError, InvalidValue, ProtocolError
from tknp.kv.free_runs import FreeRuns
from tknp.kv.holding import Holding, Key, Span, State
from tknp.kv.size import pages_for

DUMMY_PAGE = 0


class PagePool:
    """Pages 1 .. pages-1 of `page_size` tokens each; page 0 is the dummy page.

    `clock` returns seconds on any monotonic scale. Not thread-safe: one task owns a pool.
    `expired`: leases that have ended so far.
    """

    def __init__(self, pages: int, page_size: int, clock: Callable[[], float]) -> None:
        if pages < 2:
            raise InvalidValue("pages", pages, "must be at least 2: page 0 is the dummy page")
        if page_size < 1:
            raise InvalidValue("page_size", page_size, "must be at least 1")
        self.pages = pages
        self.page_size = page_size
        self._clock = clock
        self._free = FreeRuns(DUMMY_PAGE + 1, pages)
        self._holdings: dict[Key, Holding] = {}
        self._quarantine: dict[Key, Holding] = {}
        self.expired = 0

    @property
    def free_tokens(self) -> int:
        """Tokens that fit in the pages that are free now."""
        return len(self._free) * self.page_size

    @property
    def total_tokens(self) -> int:
        """Tokens that fit in an empty pool."""
        return (self.pages - 1) * self.page_size

    def holding(self, key: Key) -> Holding:
        """What `key` holds. ProtocolError if it holds nothing."""
        try:
            return self._holdings[key]
        except KeyError:
            where = "quarantined" if key in self._quarantine else "unknown"
            raise ProtocolError(f"holding {key} is {where} here: reserve it first") from None

    def holdings(self) -> list[Holding]:
        """Every holding of a request, oldest first; quarantined pages are not among them."""
        return list(self._holdings.values())

    def quarantined(self) -> list[Holding]:
        """Holdings whose request is done while their `writer` may still write, oldest first."""
        return list(self._quarantine.values())

    def counts(self) -> dict[State, int]:
        """Pages in each state; they add up to `pages - 1`."""
        counts = dict.fromkeys(State, 0)
        counts[State.FREE] = len(self._free)
        for holding in self._holdings.values():
            counts[holding.state] += len(holding.pages)
        for holding in self._quarantine.values():
            counts[State.QUARANTINED] += len(holding.pages)
        return counts

    def reserve(
        self,
        key: Key,
        tokens: int,
        lease_s: float,
        *,
        token_start: int = 0,
        layers: tuple[int, int | None] = (0, None),
    ) -> tuple[int, ...]:
        """Reserve pages for tokens [token_start, token_start + tokens) of `key`; all or nothing.

        Returns page ids in token order, in as few runs as possible. CapacityError if too few are
        free now; InvalidValue if the pool could never hold them; ProtocolError if `key` is known.
        """
        if key in self._quarantine:
            raise ProtocolError(f"holding {key} is quarantined: use another attempt number")
        if key in self._holdings:
            raise self._wrong_state(self._holdings[key], "reserve")
        if lease_s <= 0:
            raise InvalidValue("lease_s", lease_s, "must be positive")
        pages = tuple(self._take(tokens, pages_for(tokens, self.page_size)))
        span = Span(token_start, token_start + tokens, *layers)
        deadline_s = self._clock() + lease_s
        self._holdings[key] = Holding(key, span, pages, State.RESERVED, lease_s, deadline_s)
        return pages

    def begin(self, key: Key, writer: str) -> None:
        """`writer` starts to write: reserved -> receiving."""
        holding = self.holding(key)
        if holding.state is State.RECEIVING and holding.writer == writer:
            return
        if holding.state is not State.RESERVED:
            raise self._wrong_state(holding, f"begin by writer {writer!r}")
        self._holdings[key] = replace(holding, state=State.RECEIVING, writer=writer)

    def renew(self, key: Key) -> None:
        """Prolong the lease to a full lease from now; nothing to do once admitted."""
        holding = self.holding(key)
        if holding.deadline_s is not None:
            deadline_s = max(holding.deadline_s, self._clock() + holding.lease_s)
            self._holdings[key] = replace(holding, deadline_s=deadline_s)

    def complete(self, key: Key, writer: str) -> bool:
        """All writes of `writer` have landed: receiving -> live, and True.

        False if the request ended meanwhile: the quarantined pages are free now and nobody wants
        the data. ProtocolError if `writer` isn't the one that began.
        """
        if self._leave_quarantine(key, writer):
            return False
        holding = self.holding(key)
        if holding.state is State.LIVE and holding.writer == writer:
            return True
        if holding.state is not State.RECEIVING or holding.writer != writer:
            raise self._wrong_state(holding, f"complete by writer {writer!r}")
        self._holdings[key] = replace(holding, state=State.LIVE)
        return True

    def settle(self, key: Key) -> None:
        """Nothing will be transferred to `key`: reserved -> live."""
        holding = self.holding(key)
        if holding.state is not State.RESERVED:
            raise self._wrong_state(holding, "settle")
        self._holdings[key] = replace(holding, state=State.LIVE)

    def admit(self, key: Key) -> None:
        """The running batch owns a live holding from now on: its lease ends."""
        holding = self.holding(key)
        if holding.state is not State.LIVE:
            raise self._wrong_state(holding, "admit")
        self._holdings[key] = replace(holding, deadline_s=None)

    def extend(self, key: Key, tokens: int) -> tuple[int, ...]:
        """Let a live holding grow by `tokens`; returns the added pages, maybe none.

        CapacityError leaves the holding as it is.
        """
        holding = self.holding(key)
        if holding.state is not State.LIVE:
            raise self._wrong_state(holding, "extend")
        span = replace(holding.span, token_stop=holding.span.token_stop + tokens)
        missing = pages_for(span.tokens, self.page_size) - len(holding.pages)
        added = tuple(self._take(tokens, missing, holding.pages[-1]))
        self._holdings[key] = replace(holding, span=span, pages=holding.pages + added)
        return added

    def release(self, key: Key) -> None:
        """The request is done with its pages. Unknown keys were released before: no error."""
        holding = self._holdings.pop(key, None)
        if holding is None:
            return
        if holding.state is State.RECEIVING:
            self._quarantine[key] = replace(holding, state=State.QUARANTINED)
        else:
            self._free.give(holding.pages)

    def abort(self, key: Key, writer: str) -> None:
        """`writer` confirms that nothing of it is in flight to `key`.

        Frees its quarantined pages, or returns a receiving holding to reserved. Anything else is
        a late repetition and changes nothing.
        """
        if self._leave_quarantine(key, writer):
            return
        holding = self._holdings.get(key)
        if holding is not None and holding.state is State.RECEIVING and holding.writer == writer:
            self._holdings[key] = replace(holding, state=State.RESERVED, writer=None)

    def writer_gone(self, writer: str) -> list[Key]:
        """`writer` is dead or deregistered for certain, so none of its writes can land any more.

        Aborts everything it was writing and returns those keys.
        """
        held = [*self._quarantine.values(), *self._holdings.values()]
        writing = (State.RECEIVING, State.QUARANTINED)
        keys = [h.key for h in held if h.writer == writer and h.state in writing]
        for key in keys:
            self.abort(key, writer)
        return keys

    def expire(self, now: float) -> list[Key]:
        """Release every holding whose lease ended by `now`, and return their keys.

        Receiving pages go to quarantine: no lease says that a write can't land any more.
        """
        held = self._holdings.values()
        keys = [h.key for h in held if h.deadline_s is not None and h.deadline_s <= now]
        for key in keys:
            self.release(key)
        self.expired += len(keys)
        return keys

    def check_integrity(self) -> None:
        """Raise ProtocolError unless each page is in exactly one place."""
        places = Counter(self._free)
        for holding in (*self._holdings.values(), *self._quarantine.values()):
            places.update(holding.pages)
        expected = range(DUMMY_PAGE + 1, self.pages)
        lost = [page for page in expected if places[page] == 0]
        shared = [page for page, n in places.items() if n > 1]
        foreign = [page for page in places if page not in expected]
        if lost or shared or foreign or sum(self.counts().values()) != len(expected):
            counts = ", ".join(f"{state} {n}" for state, n in self.counts().items())
            raise ProtocolError(
                f"page pool is inconsistent: lost pages {lost}, pages held twice {shared}, "
                f"pages that don't exist {foreign}, counts {counts} of {len(expected)}"
            )

    def _take(self, tokens: int, count: int, after: int | None = None) -> list[int]:
        if tokens < 1:
            raise InvalidValue("tokens", tokens, "must be at least 1")
        if count > self.pages - 1:
            raise InvalidValue("tokens", tokens, f"this pool holds {self.total_tokens} at most")
        if count > len(self._free):
            counts = self.counts()
            raise CapacityError(
                f"{tokens} tokens need {count} pages of {self.page_size}; {len(self._free)} of "
                f"{self.pages - 1} are free, {counts[State.QUARANTINED]} quarantined"
            )
        return self._free.take(count, after)

    def _leave_quarantine(self, key: Key, writer: str) -> bool:
        holding = self._quarantine.get(key)
        if holding is None or holding.writer != writer:
            return False
        self._free.give(self._quarantine.pop(key).pages)
        return True

    @staticmethod
    def _wrong_state(holding: Holding, operation: str) -> ProtocolError:
        by = f" (writer {holding.writer!r})" if holding.writer else ""
        return ProtocolError(f"{operation}: holding {holding.key} is {holding.state}{by}")
