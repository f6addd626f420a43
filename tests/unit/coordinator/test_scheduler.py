"""Scheduling decisions one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from tknp.coordinator.limits import Limits
from tknp.coordinator.request import Pin, Request, Stage
from tknp.coordinator.scheduler import Scheduler
from tknp.engine.batch import Delta
from tknp.errors import CapacityError, ProtocolError
from tknp.v1.common_pb2 import FinishReason

STOP = FinishReason.FINISH_REASON_STOP
LENGTH = FinishReason.FINISH_REASON_LENGTH
WORD, EOS = 7, 0
MakeLimits = Callable[..., Limits]
MakeRequest = Callable[..., Request]


def admit_all(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Submit, place, and give each its first token."""
    for request in requests:
        scheduler.submit(request)
    for request in scheduler.place():
        assert scheduler.first_token(request, WORD) is None


def launch(scheduler: Scheduler) -> Delta:
    delta = scheduler.delta()
    assert delta is not None
    return delta


def test_two_steps_are_in_flight_and_no_more(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(), epoch=5)
    request = make_request(max_tokens=10)
    admit_all(scheduler, [request])
    first, second = launch(scheduler), launch(scheduler)
    assert (first.epoch, first.step, first.ends) == (5, 0, ())
    (admit,) = first.admits
    assert (admit.slot, admit.token, admit.position) == (request.slot, WORD, 3)
    assert (second.step, second.ends, second.admits) == (1, (), ())
    assert scheduler.delta() is None
    assert scheduler.tokens(0, [request.slot], [WORD]) == [(0, request, None)]
    assert launch(scheduler).step == 2


def test_held_requests_join_in_one_step(make_limits: MakeLimits, make_request: MakeRequest) -> None:
    scheduler = Scheduler(make_limits(hold_until=2), epoch=1)
    first, second, warm_up = make_request(), make_request(), make_request(pinned=Pin(0, 0))
    admit_all(scheduler, [first])
    assert scheduler.delta() is None
    admit_all(scheduler, [warm_up])
    assert [admit.slot for admit in launch(scheduler).admits] == [warm_up.slot]
    assert launch(scheduler).admits == ()
    scheduler.tokens(0, [warm_up.slot], [WORD])
    admit_all(scheduler, [second])
    assert {admit.slot for admit in launch(scheduler).admits} == {first.slot, second.slot}


def test_an_end_by_length_wastes_no_row(make_limits: MakeLimits, make_request: MakeRequest) -> None:
    """max_tokens 3: one from prefill, two from steps 0 and 1, and step 2 begins with the end."""
    scheduler = Scheduler(make_limits(), epoch=1)
    request = make_request(max_tokens=3)
    admit_all(scheduler, [request])
    launch(scheduler)
    launch(scheduler)
    assert scheduler.tokens(0, [request.slot], [WORD]) == [(0, request, None)]
    assert launch(scheduler).ends == (request.slot,)
    assert scheduler.tokens(1, [request.slot], [WORD]) == [(0, request, LENGTH)]
    assert scheduler.tokens(2, [], []) == []
    assert scheduler.delta() is None
    assert request.generated == [WORD] * 3


@pytest.mark.parametrize("token", [EOS, 9])
def test_an_end_by_token_wastes_one_row(
    token: int, make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(), epoch=1)
    request = make_request(max_tokens=9, stop_token_ids=(9,))
    admit_all(scheduler, [request])
    launch(scheduler)
    launch(scheduler)
    assert scheduler.tokens(0, [request.slot], [token]) == [(0, request, STOP)]
    assert launch(scheduler).ends == (request.slot,)
    assert scheduler.tokens(1, [request.slot], [WORD]) == []  # the discarded row
    assert scheduler.tokens(2, [], []) == []
    assert request.generated == [WORD, token]


def test_eos_is_ignored_on_request(make_limits: MakeLimits, make_request: MakeRequest) -> None:
    scheduler = Scheduler(make_limits(), epoch=1)
    request = make_request(max_tokens=2, ignore_eos=True)
    scheduler.submit(request)
    scheduler.place()
    assert scheduler.first_token(request, EOS) is None


@pytest.mark.parametrize(("max_tokens", "token", "finish"), [(1, WORD, LENGTH), (5, EOS, STOP)])
def test_a_first_token_may_be_the_last(
    max_tokens: int, token: int, finish: int, make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(max_batch=1), epoch=1)
    request, other = make_request(3, max_tokens), make_request(3, 5)
    scheduler.submit(request)
    scheduler.submit(other)
    assert scheduler.place() == [request]
    assert scheduler.first_token(request, token) == finish
    assert scheduler.delta() is None
    assert scheduler.place() == [other]  # its slot is free at once, its pages after `freed`
    held = -(-(3 + max_tokens) // 4)
    assert [load.used for load in scheduler.loads] == [held, 2]
    scheduler.freed(request)
    assert [load.used for load in scheduler.loads] == [0, 2]


def test_pages_come_back_when_every_rank_is_past_the_end(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(pages=(3,)), epoch=1)
    first, second = make_request(8, 4), make_request(1, 1)
    admit_all(scheduler, [first])
    scheduler.submit(second)
    for _ in range(3):
        step = launch(scheduler).step
        scheduler.tokens(step, [first.slot], [WORD])
        scheduler.finished(step)
    assert first.stage is Stage.ENDED
    end = launch(scheduler)
    assert end.ends == (first.slot,)
    assert scheduler.place() == []
    scheduler.tokens(end.step, [], [])
    scheduler.finished(end.step)
    assert scheduler.place() == [second]


def test_the_head_waits_and_nobody_overtakes_it(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(pages=(8,)), epoch=1)
    running, long, short = make_request(20, 4), make_request(12, 4), make_request(1, 1)
    for request in (running, long, short):
        scheduler.submit(request)
    assert scheduler.place() == [running]
    assert scheduler.place() == []
    scheduler.end(running)
    scheduler.freed(running)
    assert scheduler.place() == [long, short]


def test_priority_first_then_arrival_also_for_those_who_come_back(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(max_batch=2), epoch=1)
    names = {"low": -1, "a": 0, "b": 0, "high": 3, "c": 0}
    requests = {name: make_request(priority=priority) for name, priority in names.items()}
    for request in requests.values():
        scheduler.submit(request)
    order = [requests[name] for name in ("high", "a", "b", "c", "low")]
    assert list(scheduler.waiting) == order
    assert scheduler.place() == order[:2]
    scheduler.unplace(requests["a"])
    assert list(scheduler.waiting) == order[1:]
    assert requests["a"].key.attempt == 1
    assert scheduler.place() == [requests["a"]]


def test_the_owner_is_the_node_with_the_lowest_load_that_fits(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(pages=(4, 8, 6)), epoch=1)
    requests = [make_request(12, 4), make_request(20, 4), make_request(8, 4), make_request(4, 4)]
    for request in requests:
        scheduler.submit(request)
    assert [r.owners for r in scheduler.place()] == [(0,), (1,), (2,), (2,)]
    assert [scheduler.owned_requests(node) for node in range(3)] == [1, 1, 2]


def test_a_pinned_request_waits_for_its_node(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(pages=(2, 2)), epoch=1)
    for request in (make_request(3, 5, pinned=Pin(0, 1)), make_request(3, 5, pinned=Pin(0, 1))):
        scheduler.submit(request)
    (placed,) = scheduler.place()
    assert placed.owners == (1,)


def test_withheld_pages_are_not_given(make_limits: MakeLimits, make_request: MakeRequest) -> None:
    scheduler = Scheduler(make_limits(pages=(4,)), epoch=1)
    request = make_request(8, 4)
    scheduler.submit(request)
    scheduler.withhold(0, 2)
    assert scheduler.place() == []
    scheduler.withhold(0, 1)
    assert scheduler.place() == [request]


def test_a_full_queue_refuses_with_its_limit(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(max_queue=2), epoch=1)
    first, second, third = (make_request() for _ in range(3))
    scheduler.submit(first)
    scheduler.submit(second)
    with pytest.raises(CapacityError, match=r"2 requests wait already, max_queue=2"):
        scheduler.submit(third)
    scheduler.end(first)
    scheduler.submit(third)


def test_deadlines_are_told_wherever_a_request_is(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(max_batch=3), epoch=1)
    running, ready, placed, queued = (make_request(deadline_s=float(n)) for n in (4, 3, 2, 1))
    admit_all(scheduler, [running])
    launch(scheduler)
    admit_all(scheduler, [ready])
    scheduler.submit(placed)
    scheduler.place()
    scheduler.submit(queued)
    scheduler.submit(make_request())
    stages = [Stage.RUNNING, Stage.READY, Stage.PLACED, Stage.QUEUED]
    assert [r.stage for r in (running, ready, placed, queued)] == stages
    assert scheduler.overdue(0.99) == []
    assert scheduler.overdue(2.0) == [placed, queued]
    for request in scheduler.overdue(4.0):
        scheduler.end(request)
    assert scheduler.overdue(100.0) == []
    assert launch(scheduler).ends == (running.slot,)


def test_a_failed_row_ends_its_request_alone(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(), epoch=1)
    good, bad = make_request(), make_request()
    admit_all(scheduler, [good, bad])
    launch(scheduler)
    taken = scheduler.tokens(0, [good.slot, bad.slot], [WORD, None])
    assert taken == [(0, good, None), (1, bad, None)]
    assert (good.stage, bad.stage) == (Stage.RUNNING, Stage.ENDED)
    assert launch(scheduler).ends == (bad.slot,)


def test_a_cancelled_row_runs_in_two_more_steps_at_most(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(), epoch=1)
    gone, other = make_request(max_tokens=20), make_request(max_tokens=20)
    admit_all(scheduler, [gone, other])
    slots = [gone.slot, other.slot]
    launch(scheduler)
    launch(scheduler)
    scheduler.end(gone)
    assert scheduler.tokens(0, slots, [WORD, WORD]) == [(1, other, None)]
    assert launch(scheduler).ends == (gone.slot,)
    assert scheduler.tokens(1, slots, [WORD, WORD]) == [(1, other, None)]
    assert scheduler.tokens(2, [other.slot], [WORD]) == [(0, other, None)]


def test_a_row_cancelled_at_its_last_step_leaves_once(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    """It would have left by length with the very step that its cancellation takes it out of."""
    scheduler = Scheduler(make_limits(), epoch=1)
    request = make_request(max_tokens=3)
    admit_all(scheduler, [request])
    launch(scheduler)
    launch(scheduler)
    scheduler.end(request)
    assert scheduler.tokens(0, [request.slot], [WORD]) == []
    assert launch(scheduler).ends == (request.slot,)
    assert scheduler.tokens(1, [request.slot], [WORD]) == []
    assert scheduler.delta() is None


@pytest.mark.parametrize("slots", [[], [0, 1], [5], [0, 0]])
def test_an_answer_for_other_rows_is_refused(
    slots: list[int], make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(), epoch=1)
    admit_all(scheduler, [make_request()])
    launch(scheduler)
    with pytest.raises(ProtocolError, match=r"step 0 answers for slots .*asked: slots \[0\]"):
        scheduler.tokens(0, slots, [WORD] * len(slots))


def test_an_answer_to_a_step_never_sent_is_refused(make_limits: MakeLimits) -> None:
    with pytest.raises(ProtocolError, match=r"step 4 .* no such step"):
        Scheduler(make_limits(), epoch=1).tokens(4, [], [])


def test_penalties_travel_with_their_history(
    make_limits: MakeLimits, make_request: MakeRequest
) -> None:
    scheduler = Scheduler(make_limits(), epoch=1)
    request = make_request(3)
    request.params = replace(request.params, presence_penalty=0.5)
    admit_all(scheduler, [request])
    (admit,) = launch(scheduler).admits
    assert (admit.prompt, admit.generated, admit.generated_count) == ((1, 2, 3), (WORD,), 1)
