from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tknp.errors import CapacityError, InvalidValue, ProtocolError
from tknp.kv.holding import Key, Span, State
from tknp.kv.pages import DUMMY_PAGE, PagePool

A, B = Key("a", 0), Key("b", 0)
LEASE_S = 30.0


@pytest.fixture
def pool(clock: Callable[[], float]) -> PagePool:
    return PagePool(pages=11, page_size=4, clock=clock)


def bring(pool: PagePool, key: Key, state: State, tokens: int = 8) -> tuple[int, ...]:
    """Reserve `key` and lead it to `state`; the writer is "w"."""
    pages = pool.reserve(key, tokens, LEASE_S)
    if state is not State.RESERVED:
        pool.begin(key, "w")
    if state is State.LIVE:
        pool.complete(key, "w")
    if state is State.QUARANTINED:
        pool.release(key)
    return pages


def only(pool: PagePool, state: State, pages: int = 2) -> bool:
    """Whether `pages` pages are in `state` and all others free."""
    pool.check_integrity()
    expected = dict.fromkeys(State, 0)
    expected[State.FREE] = pool.pages - 1
    expected[State.FREE] -= pages
    expected[state] += pages
    return pool.counts() == expected


def test_life_of_a_request(pool: PagePool) -> None:
    assert pool.free_tokens == pool.total_tokens == 40
    pages = pool.reserve(A, 9, LEASE_S)
    assert pages == (1, 2, 3)
    assert only(pool, State.RESERVED, 3)
    pool.begin(A, "w")
    assert only(pool, State.RECEIVING, 3)
    assert pool.complete(A, "w")
    assert only(pool, State.LIVE, 3)
    pool.admit(A)
    assert pool.extend(A, 3) == ()
    assert pool.extend(A, 1) == (4,)
    assert pool.holding(A).pages == (1, 2, 3, 4)
    assert pool.holding(A).span == Span(0, 13)
    assert pool.free_tokens == 24
    pool.release(A)
    assert only(pool, State.FREE, 0)


def test_a_reservation_is_all_or_nothing(pool: PagePool) -> None:
    pool.reserve(A, 28, LEASE_S)
    with pytest.raises(CapacityError, match=r"13 tokens need 4 pages of 4; 3 of 10 are free"):
        pool.reserve(B, 13, LEASE_S)
    assert only(pool, State.RESERVED, 7)
    assert len(pool.reserve(B, 12, LEASE_S)) == 3


def test_the_dummy_page_is_never_handed_out(pool: PagePool) -> None:
    assert DUMMY_PAGE not in pool.reserve(A, pool.total_tokens, LEASE_S)


def test_what_can_never_fit_is_a_bad_value_not_a_lack_of_room(pool: PagePool) -> None:
    with pytest.raises(InvalidValue, match=r"tokens=41: this pool holds 40 at most"):
        pool.reserve(A, 41, LEASE_S)


@pytest.mark.parametrize("tokens", [0, -1])
def test_nothing_is_not_a_reservation(pool: PagePool, tokens: int) -> None:
    with pytest.raises(InvalidValue, match="at least 1"):
        pool.reserve(A, tokens, LEASE_S)


def test_a_shard_keeps_its_layer_and_token_range(pool: PagePool) -> None:
    pool.reserve(A, 6, LEASE_S, token_start=100, layers=(4, 8))
    assert pool.holding(A).span == Span(100, 106, 4, 8)


def test_attempts_of_a_request_are_holdings_of_their_own(pool: PagePool) -> None:
    first = pool.reserve(Key("a", 0), 4, LEASE_S)
    second = pool.reserve(Key("a", 1), 4, LEASE_S)
    assert set(first).isdisjoint(second)
    pool.release(Key("a", 0))
    assert pool.holding(Key("a", 1)).pages == second


def test_release_while_a_writer_is_in_flight_waits_for_it(pool: PagePool) -> None:
    bring(pool, A, State.RECEIVING)
    pool.release(A)
    assert only(pool, State.QUARANTINED)
    pool.abort(A, "someone else")
    assert only(pool, State.QUARANTINED)
    pool.abort(A, "w")
    assert only(pool, State.FREE, 0)


def test_a_completion_after_the_request_ended_frees_and_says_so(pool: PagePool) -> None:
    bring(pool, A, State.QUARANTINED)
    assert not pool.complete(A, "w")
    assert only(pool, State.FREE, 0)


def test_an_abort_leaves_the_request_its_pages_for_another_writer(pool: PagePool) -> None:
    pages = bring(pool, A, State.RECEIVING)
    pool.abort(A, "w")
    assert only(pool, State.RESERVED)
    pool.begin(A, "w2")
    assert pool.complete(A, "w2")
    assert pool.holding(A).pages == pages


def test_pages_that_nobody_will_write_are_live_at_once(pool: PagePool) -> None:
    pages = pool.reserve(A, 6, LEASE_S)
    pool.settle(A)
    assert only(pool, State.LIVE)
    pool.admit(A)
    assert pool.extend(A, 4) == (pages[-1] + 1,)
    pool.release(A)
    assert only(pool, State.FREE, 0)


@pytest.mark.parametrize("state", [State.RECEIVING, State.LIVE])
def test_pages_that_somebody_writes_or_wrote_are_not_settled(pool: PagePool, state: State) -> None:
    bring(pool, A, state)
    with pytest.raises(ProtocolError, match=f"settle: holding .* is {state}"):
        pool.settle(A)


@pytest.mark.parametrize("state", [State.RESERVED, State.LIVE])
def test_a_late_abort_changes_nothing(pool: PagePool, state: State) -> None:
    bring(pool, A, state)
    pool.abort(A, "w")
    pool.abort(B, "w")
    assert only(pool, state)


def test_a_dead_writer_frees_its_quarantine_and_gives_back_the_rest(pool: PagePool) -> None:
    bring(pool, A, State.QUARANTINED)
    bring(pool, B, State.RECEIVING)
    live = Key("c", 0)
    bring(pool, live, State.LIVE)
    assert set(pool.writer_gone("w")) == {A, B}
    counts = pool.counts()
    assert counts[State.QUARANTINED] == 0
    assert counts[State.RESERVED] == counts[State.LIVE] == 2
    assert pool.writer_gone("w") == []


@pytest.mark.parametrize(
    ("state", "afterwards"),
    [
        (State.RESERVED, State.FREE),
        (State.RECEIVING, State.QUARANTINED),
        (State.LIVE, State.FREE),
    ],
)
def test_a_lease_ends(pool: PagePool, clock: Any, state: State, afterwards: State) -> None:
    bring(pool, A, state)
    assert pool.expire(clock.now + LEASE_S - 0.001) == []
    assert only(pool, state)
    assert pool.expire(clock.now + LEASE_S) == [A]
    assert only(pool, afterwards, 2 if afterwards is State.QUARANTINED else 0)


def test_no_lease_frees_quarantine(pool: PagePool, clock: Any) -> None:
    bring(pool, A, State.QUARANTINED)
    assert pool.expire(clock.now + 1e9) == []
    assert only(pool, State.QUARANTINED)


def test_a_renewed_lease_counts_from_now(pool: PagePool, clock: Any) -> None:
    bring(pool, A, State.RECEIVING)
    start = clock.now
    clock.now += 20
    pool.renew(A)
    assert pool.expire(start + LEASE_S + 19.9) == []
    assert pool.expire(start + LEASE_S + 20) == [A]


def test_the_running_batch_needs_no_lease(pool: PagePool, clock: Any) -> None:
    bring(pool, A, State.LIVE)
    pool.admit(A)
    pool.renew(A)
    assert pool.holding(A).admitted
    assert pool.expire(clock.now + 1e9) == []
    assert only(pool, State.LIVE)


def test_repetitions_are_harmless(pool: PagePool) -> None:
    bring(pool, A, State.RESERVED)
    pool.begin(A, "w")
    pool.begin(A, "w")
    assert pool.complete(A, "w")
    assert pool.complete(A, "w")
    pool.admit(A)
    pool.admit(A)
    pool.release(A)
    pool.release(A)
    assert only(pool, State.FREE, 0)


CALLS: dict[str, Callable[[PagePool, Key], object]] = {
    "reserve": lambda pool, key: pool.reserve(key, 4, LEASE_S),
    "begin": lambda pool, key: pool.begin(key, "w2"),
    "renew": lambda pool, key: pool.renew(key),
    "complete": lambda pool, key: pool.complete(key, "w2"),
    "admit": lambda pool, key: pool.admit(key),
    "extend": lambda pool, key: pool.extend(key, 1),
}


@pytest.mark.parametrize(
    ("state", "refused"),
    [
        (State.RESERVED, {"reserve", "complete", "admit", "extend"}),
        (State.RECEIVING, {"reserve", "begin", "complete", "admit", "extend"}),
        (State.LIVE, {"reserve", "begin", "complete"}),
        (State.QUARANTINED, set(CALLS)),
    ],
)
def test_calls_that_do_not_fit_the_state(pool: PagePool, state: State, refused: set[str]) -> None:
    bring(pool, A, state)
    for name in refused:
        with pytest.raises(ProtocolError, match=rf"a/0 is {state}"):
            CALLS[name](pool, A)
        assert only(pool, state)


@pytest.mark.parametrize("name", sorted(set(CALLS) - {"reserve"}))
def test_unknown_keys_are_named(pool: PagePool, name: str) -> None:
    with pytest.raises(ProtocolError, match=r"a/0 is unknown"):
        CALLS[name](pool, A)


def test_growth_without_room_leaves_the_holding(pool: PagePool) -> None:
    bring(pool, A, State.LIVE)
    before = pool.holding(A)
    with pytest.raises(CapacityError):
        pool.reserve(B, 36, LEASE_S)
    pool.reserve(B, 32, LEASE_S)
    with pytest.raises(CapacityError):
        pool.extend(A, 1)
    assert pool.holding(A) == before


def test_integrity_check_finds_a_page_held_twice_and_a_lost_one(pool: PagePool) -> None:
    pages = bring(pool, A, State.LIVE)
    pool._free.give([pages[0]])
    with pytest.raises(ProtocolError, match=r"held twice \[1\]"):
        pool.check_integrity()
    pool._free.take(1)
    pool._free.take(2)
    with pytest.raises(ProtocolError, match=r"lost pages \[3, 4\]"):
        pool.check_integrity()
