"""Any order of calls from requests, writers and the clock, against a model of who may touch a page.

The model knows nothing of page states: it keeps, for each page, which request holds it and which
writer may still write to it. Both empty is the only way to be free.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tknp.errors import CapacityError, ProtocolError
from tknp.kv.holding import Key, State
from tknp.kv.pages import DUMMY_PAGE, PagePool

PAGES, PAGE_SIZE, LEASE_S = 13, 4, 10.0
KEYS = st.sampled_from([Key("a", 0), Key("a", 1), Key("b", 0)])
WRITERS = st.sampled_from(["w1", "w2"])


class Pool(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.pool = PagePool(PAGES, PAGE_SIZE, lambda: self.now)
        self.held: dict[Key, set[int]] = {}
        self.writing: dict[tuple[Key, str], set[int]] = {}

    @rule(key=KEYS, tokens=st.integers(1, 20))
    def reserve(self, key: Key, tokens: int) -> None:
        try:
            pages = self.pool.reserve(key, tokens, LEASE_S)
        except (CapacityError, ProtocolError):
            return
        assert len(pages) == -(-tokens // PAGE_SIZE)
        assert set(pages).isdisjoint(self.touched())
        assert DUMMY_PAGE not in pages
        self.held[key] = set(pages)

    @rule(key=KEYS, tokens=st.integers(1, 9))
    def extend(self, key: Key, tokens: int) -> None:
        try:
            pages = self.pool.extend(key, tokens)
        except (CapacityError, ProtocolError):
            return
        assert set(pages).isdisjoint(self.touched())
        self.held[key] |= set(pages)

    @rule(key=KEYS, writer=WRITERS)
    def begin(self, key: Key, writer: str) -> None:
        try:
            self.pool.begin(key, writer)
        except ProtocolError:
            return
        self.writing[key, writer] = set(self.held[key])

    @rule(key=KEYS, writer=WRITERS)
    def complete(self, key: Key, writer: str) -> None:
        try:
            live = self.pool.complete(key, writer)
        except ProtocolError:
            assert (key, writer) not in self.writing
            return
        assert live == (key in self.held)
        self.writing.pop((key, writer), None)

    @rule(key=KEYS, writer=WRITERS)
    def abort(self, key: Key, writer: str) -> None:
        self.pool.abort(key, writer)
        self.writing.pop((key, writer), None)

    @rule(writer=WRITERS)
    def writer_gone(self, writer: str) -> None:
        gone = {pair for pair in self.writing if pair[1] == writer}
        assert set(self.pool.writer_gone(writer)) == {key for key, _ in gone}
        for pair in gone:
            del self.writing[pair]

    @rule(key=KEYS, writer=WRITERS, complete=st.booleans())
    def transfer(self, key: Key, writer: str, complete: bool) -> None:
        """The usual way at once, so that its far end is visited often."""
        self.reserve(key, 7)
        self.begin(key, writer)
        if complete:
            self.complete(key, writer)
            self.admit(key)

    @rule(key=KEYS)
    def admit(self, key: Key) -> None:
        try:
            self.pool.admit(key)
        except ProtocolError:
            return
        assert not any(writing == key for writing, _ in self.writing)

    @rule(key=KEYS)
    def renew(self, key: Key) -> None:
        try:
            self.pool.renew(key)
        except ProtocolError:
            assert key not in self.held

    @rule(key=KEYS)
    def release(self, key: Key) -> None:
        self.pool.release(key)
        self.held.pop(key, None)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        admitted = {h.key for h in self.pool.holdings() if h.admitted}
        for key in self.pool.expire(self.now):
            assert key not in admitted
            del self.held[key]

    @invariant()
    def free_is_what_nobody_can_touch(self) -> None:
        self.pool.check_integrity()
        untouched = set(range(1, PAGES)) - self.touched()
        assert self.pool.free_tokens == len(untouched) * PAGE_SIZE
        assert {h.key: set(h.pages) for h in self.pool.holdings()} == self.held
        quarantined = set[int]().union(
            *(pages for (key, _), pages in self.writing.items() if key not in self.held)
        )
        assert self.pool.counts()[State.QUARANTINED] == len(quarantined)

    def touched(self) -> set[int]:
        return set[int]().union(*self.held.values(), *self.writing.values())

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for key in list(self.held):
            self.release(key)
        for writer in ("w1", "w2"):
            self.writer_gone(writer)
        assert self.pool.free_tokens == self.pool.total_tokens


TestPool: Any = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
