"""Which stream and which owners a request gets, and where it goes when it outgrows them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from tknp.coordinator.limits import Limits
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.scheduler import Scheduler
from tknp.v1.common_pb2 import FinishReason

WORD = 7
MakeLimits = Callable[..., Limits]
MakeRequest = Callable[..., Request]
TWO_STREAMS = ((0, 1), (0, 1))


def start(scheduler: Scheduler, *requests: Request) -> None:
    """Submit, place, and give each its first token."""
    for request in requests:
        scheduler.submit(request)
    placed = scheduler.place()
    assert set(placed) == set(requests)
    for request in placed:
        scheduler.first_token(request, WORD)


def step(scheduler: Scheduler, stream: int = 0) -> None:
    """Launch one step, and answer it."""
    delta = scheduler.delta(stream)
    assert delta is not None
    slots = list(scheduler.streams[stream].in_flight[delta.step])
    scheduler.tokens(delta.step, slots, [WORD] * len(slots), stream)
    scheduler.finished(delta.step, stream)


def test_microbatches_are_spread_over_all_owners(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    """Equal requests: as many in each stream, and of each stream as many at each node."""
    scheduler = Scheduler(make_limits(pages=(40, 40), streams=TWO_STREAMS), epoch=1)
    requests = [make_request() for _ in range(12)]
    start(scheduler, *requests)
    seats = Counter((r.stream, r.owners) for r in requests)
    assert seats == {(s, (n,)): 3 for s in range(2) for n in range(2)}


def test_replicas_take_requests_by_their_load(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(streams=((0,), (1,)), max_batch=2), epoch=1)
    long, *short = [make_request(20, 4)] + [make_request(1, 3) for _ in range(3)]
    start(scheduler, long, *short)
    assert (long.stream, long.owners) == (0, (0,))
    assert [(r.stream, r.owners) for r in short] == [(1, (1,)), (1, (1,)), (0, (0,))]


def test_streams_step_on_their_own(make_limits: MakeLimits, make_request: MakeRequest) -> None:
    scheduler = Scheduler(make_limits(pages=(40, 40), streams=TWO_STREAMS), epoch=1)
    requests = [make_request(max_tokens=4) for _ in range(2)]
    start(scheduler, *requests)
    for _ in range(4):
        step(scheduler, stream=1)
    finished = [request.stage is Stage.ENDED for request in requests]
    assert finished == [request.stream == 1 for request in requests]
    assert [stream.steps for stream in scheduler.streams] == [0, 4]
    assert scheduler.delta(0) is not None


def test_a_request_waits_for_one_owner_where_one_could_hold_it(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(width=2), epoch=1)
    start(scheduler, *(make_request(15, 5) for _ in range(2)))
    whole, wide = make_request(20, 12), make_request(40, 4)
    for request in (whole, wide):
        scheduler.submit(request)
    assert scheduler.place() == []
    for request in scheduler.live[:2]:
        scheduler.end(request)
        scheduler.freed(request)
    assert scheduler.place() == [whole]
    assert len(whole.owners) == 1
    scheduler.end(whole)
    scheduler.freed(whole)
    assert scheduler.place() == [wide]
    assert wide.owners == (0, 1)
    assert scheduler.reserved_tokens(wide) == [24, 20]  # five pages of the prompt and the output


def outgrow(scheduler: Scheduler, request: Request) -> list[tuple[int, ...]]:
    """Run `request` to its end, alone; the nodes asked for a page each time."""
    asked = []
    while not request.ended:
        step(scheduler)
        for growth in scheduler.growths():
            asked.append(growth.nodes)
            assert scheduler.grew(growth, growth.nodes)
    return asked


def test_an_owner_is_asked_first_and_then_a_further_one(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    """Three pages at node 0, then what node 1 has; all positions stay where they were stored."""
    limits = make_limits(pages=(5, 8), width=2, reserve_ratio=0.0)
    scheduler = Scheduler(limits, epoch=1)
    request = make_request(3, 36, ignore_eos=True)
    scheduler.withhold(1, 4)  # so that node 0 has less load
    start(scheduler, request)
    scheduler.withhold(1, 0)
    assert (request.owners, request.held) == ((0,), {0: 3})
    asked = outgrow(scheduler, request)
    assert asked == [(0,)] * 2 + [(1,)] * 5
    assert request.owners == (0, 1)
    assert [request.shares.owner_at(p) for p in (3, 19, 20, 38)] == [0, 0, 1, 1]


def test_the_youngest_makes_room_and_then_has_room_for_all(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(pages=(8,), reserve_ratio=0.0), epoch=1)
    old, young = make_request(3, 20, ignore_eos=True), make_request(3, 20, ignore_eos=True)
    start(scheduler, old, young)
    while not scheduler.preemptions:
        step(scheduler)
        for growth in scheduler.growths():
            assert scheduler.grew(growth, growth.nodes)
    assert (young.stage, old.stage) == (Stage.PREEMPTED, Stage.RUNNING)
    generated = len(young.generated)
    step(scheduler)
    assert (young.stage, young.key.attempt) == (Stage.QUEUED, 1)
    assert len(young.generated) == generated
    assert scheduler.place() == []  # `old` has to grow first, and then holds what is needed
    outgrow(scheduler, old)
    step(scheduler)
    assert scheduler.place() == [young]
    assert (young.shares.prompt, young.covered) == (3 + generated, young.most_tokens)
    scheduler.first_token(young, WORD)
    (admit,) = scheduler.delta().admits
    assert (admit.position, admit.generated_count) == (3 + generated, generated + 1)


def test_a_row_without_room_leaves_rather_than_write_elsewhere(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    """Its owner refuses every page: it is computed again, with room for all of it."""
    scheduler = Scheduler(make_limits(pages=(8,), reserve_ratio=0.0), epoch=1)
    request = make_request(3, 20, ignore_eos=True)
    start(scheduler, request)
    while request.stage is Stage.RUNNING or not scheduler.preemptions:
        step(scheduler)
        for growth in scheduler.growths():
            assert not scheduler.grew(growth, ())
            scheduler.shrunk(growth)
    assert scheduler.preemptions == 1
    while request.stage is not Stage.QUEUED:
        step(scheduler)
    assert 3 + len(request.generated) <= 13  # three pages of 4, and the token that was to come
    assert scheduler.loads[0].used == 0


def test_a_step_waits_for_an_owner_that_has_not_answered(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(pages=(8,), reserve_ratio=0.0), epoch=1)
    request = make_request(3, 20, ignore_eos=True)
    start(scheduler, request)
    asked = []
    while (delta := scheduler.delta()) is not None:
        scheduler.tokens(delta.step, [request.slot], [WORD])
        scheduler.finished(delta.step)
        asked += scheduler.growths()
    (growth,) = asked
    assert request.joined + scheduler.steps == request.covered == 12
    assert scheduler.grew(growth, growth.nodes)
    (grow,) = scheduler.delta().grows
    assert (grow.slot, grow.shares) == (request.slot, request.shares)


@pytest.mark.parametrize("ends", [True, False])
def test_what_comes_too_late_is_given_back(
    ends: bool, make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    """A further owner answers when the request has ended, or has left to make room."""
    scheduler = Scheduler(make_limits(pages=(3, 8), width=2, reserve_ratio=0.0), epoch=1)
    request = make_request(3, 20, ignore_eos=True)
    scheduler.withhold(1, 8)
    start(scheduler, request)
    scheduler.withhold(1, 0)
    growths = scheduler.growths()
    while not growths:
        step(scheduler)
        growths = scheduler.growths()
    (growth,) = growths
    assert (growth.nodes, growth.further, scheduler.loads[1].used) == ((1,), 1, 1)
    if ends:
        scheduler.end(request)
        step(scheduler)
    given = (1,) if ends else ()
    assert not scheduler.grew(growth, given)
    assert scheduler.loads[1].used == 1
    scheduler.shrunk(growth)
    assert scheduler.loads[1].used == 0


def test_a_request_may_come_with_what_it_generated_before(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(), epoch=1)
    request = make_request(3, 6, generated=[5, 5, 5, 5], given=4)
    scheduler.submit(request)
    scheduler.place()
    assert request.shares.prompt == 7
    assert scheduler.first_token(request, WORD) is None
    (admit,) = scheduler.delta().admits
    assert (admit.position, admit.token, admit.generated_count) == (7, WORD, 5)
    assert scheduler.tokens(0, [request.slot], [WORD]) == [
        (0, request, FinishReason.FINISH_REASON_LENGTH)
    ]
