"""Steps of several streams on one engine thread: while one waits, another goes on.

    submit(delta) --> the lane of its stream --> steps in order, one at a time

Before every computation a step gives way (TURN). Which one goes on, and which one waits although
nothing else is ready, `tknp.layout.turns` says. Whole layers that may begin go on together in one
call, which gives way in the same order (`tknp.kernels.together`). Messages are posted and received
as soon as they can be. When nothing can go on the thread polls, with pauses that grow, so that it
doesn't take the core of those it waits for.

On CUDA nothing is waited for on the host: each step is enqueued whole, in the order of messages,
which is the same on every rank, on the CUDA stream of its lane.

A step that fails breaks the rank: the steps of every lane fail with it.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_uint64
from dataclasses import dataclass, field

import torch

from tknp.engine.batch import Delta
from tknp.engine.decode import DecodeRank, Outcome
from tknp.engine.turn import TURN
from tknp.kernels.together import LayersCall
from tknp.layout.turns import Known, Turns
from tknp.transport.base import Work

_SPINS = 100  # polls without leaving the core
_YIELD_S = 0.002  # then this long of polling and yielding
_SLEEP_S = 0.000_05  # then sleeps


@dataclass
class _Submitted:
    delta: Delta
    future: Future[Outcome]
    order: int
    turn: int = 0


@dataclass
class _Lane:
    """Steps of one stream: those that wait for their turn, and the one under way."""

    stream: int
    context: Callable[[], AbstractContextManager[object]]
    queue: deque[_Submitted] = field(default_factory=deque)
    running: Generator[Work, None, Outcome] | None = None
    work: Work | None = None


class Lanes:
    """Of one rank. `submit` is called by any thread, `run` by the engine's."""

    def __init__(self, rank: DecodeRank, device: torch.device) -> None:
        self._rank = rank
        self._lanes = {s: _Lane(s, _context(device)) for s in rank.streams}
        self._turns = Turns.of(rank.layout, rank.rank.node)
        self._arrivals: queue.SimpleQueue[_Submitted] = queue.SimpleQueue()
        self._arrived = 0
        self._called = c_uint64(0)  # not 0: a step has come

    def submit(self, delta: Delta) -> Future[Outcome]:
        """Queue a step; `run` has to be called once more for it."""
        future: Future[Outcome] = Future()
        self._arrived += 1
        self._arrivals.put(_Submitted(delta, future, self._arrived))
        self._called.value = 1
        return future

    @torch.inference_mode()
    def run(self) -> None:
        """Run what has been submitted, also meanwhile, until nothing is left."""
        idle = _Pause()
        while True:
            self._take_arrivals()
            if len(self._lanes) == 1:
                self._run_whole(*self._lanes.values())
                return
            busy = [lane for lane in self._lanes.values() if lane.queue]
            if not busy:
                return
            lane = self._next(busy)
            if self._layers(busy, lane):
                idle = _Pause()
            elif lane is not None:
                self._advance(lane)
                idle = _Pause()
            elif any(lane.queue for lane in busy):  # none if one has failed
                idle.wait()

    def _take_arrivals(self) -> None:
        self._called.value = 0
        while not self._arrivals.empty():
            submitted = self._arrivals.get()
            lane = self._lanes.get(submitted.delta.stream)
            if lane is None:
                lane = next(iter(self._lanes.values()))  # whose step then fails with the reason
            else:
                submitted.turn = self._turns.next_turn(lane.stream)
            lane.queue.append(submitted)

    def _run_whole(self, lane: _Lane) -> None:
        """Steps of a lane that has nobody to give way to."""
        while lane.queue:
            submitted = lane.queue[0]
            try:
                outcome = self._rank.step(submitted.delta)
            except Exception as error:
                self._fail(lane, error)
            else:
                lane.queue.popleft()
                submitted.future.set_result(outcome)

    def _layers(self, busy: list[_Lane], next_: _Lane | None) -> bool:
        """Go on with runs of whole layers, unless there is something shorter; False if none could.

        Only by a stage where `next_` has its turn, or another lane waits for messages.
        """
        runs = [(lane, lane.work) for lane in busy if isinstance(lane.work, LayersCall)]
        runs = [(lane, work) for lane, work in runs if not work.done()]
        if not runs or (next_ is not None and next_.work is not TURN):
            return False
        once = next_ is not None or any(
            lane.work is not TURN and not isinstance(lane.work, LayersCall) for lane in busy
        )
        try:
            return LayersCall.together([work for _, work in runs], self._called, once=once)
        except Exception as error:
            self._fail(runs[0][0], error)
            return True

    def _next(self, busy: list[_Lane]) -> _Lane | None:
        """The lane that goes on now; None if all wait for peers or for their turn."""
        moving = [lane for lane in busy if lane.work is not TURN and self._ready(lane)]
        moving = [lane for lane in moving if lane.queue]  # none if one has failed
        if moving:
            return min(moving, key=lambda lane: lane.queue[0].order)
        ready = [
            (lane.stream, lane.queue[0].turn, op)
            for lane in busy
            if lane.work is TURN and (op := self._rank.at(lane.stream)) is not None
        ]
        chosen = self._turns.choose(self._steps(busy), ready) if ready else None
        return None if chosen is None else self._lanes[chosen]

    def _ready(self, lane: _Lane) -> bool:
        try:
            return lane.work is None or lane.work.done()
        except Exception as error:
            self._fail(lane, error)
            return False

    def _steps(self, busy: list[_Lane]) -> Iterator[Known]:
        for lane in busy:
            op = self._rank.at(lane.stream) if lane.running is not None else None
            for submitted in lane.queue:
                yield lane.stream, submitted.turn, op
                op = None  # the others have not begun

    def _advance(self, lane: _Lane) -> None:
        """Go on with the step of `lane` until it waits for something that has not happened."""
        submitted = lane.queue[0]
        try:
            if lane.running is None:
                lane.running = self._rank.steps(submitted.delta)
            with lane.context():
                while True:
                    if lane.work is not None:
                        lane.work.wait()
                    lane.work = next(lane.running)
                    if lane.work is TURN or not lane.work.done():
                        return
        except StopIteration as end:
            lane.running = lane.work = None
            lane.queue.popleft()
            submitted.future.set_result(end.value)
        except Exception as error:
            self._fail(lane, error)

    def _fail(self, lane: _Lane, error: Exception) -> None:
        """Break the rank, and end every step of every lane."""
        self._rank.fail(lane.queue[0].delta, error)
        for each in self._lanes.values():
            each.running = each.work = None
            while each.queue:
                each.queue.popleft().future.set_exception(error)


class _Pause:
    """Between polls that found nothing: spins, then yields the core, then sleeps."""

    def __init__(self) -> None:
        self._polls = 0
        self._since = 0.0

    def wait(self) -> None:
        self._polls += 1
        if self._polls < _SPINS:
            return
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since < _YIELD_S:
            time.sleep(0)  # lets other threads of this process have the interpreter, too
        else:
            time.sleep(_SLEEP_S)


def _context(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """What the operations of one lane run in: a CUDA stream of its own."""
    if device.type != "cuda":
        return nullcontext
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))  # weights and pages are ready
    return lambda: torch.cuda.stream(stream)
