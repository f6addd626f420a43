"""Steps of several streams on one engine thread: while one waits, another goes on.

    submit(delta) --> the lane of its stream --> steps in order, one at a time

A lane whose next piece would wait for a peer gives way: to lanes that go on with dense work first,
since the whole pool waits for a root, then to the one with the oldest step. Among microbatches this
fills one's exchanges with the other's work. When every lane waits, the thread polls, with pauses
that grow, so that it doesn't take the core of those it waits for.

On CUDA nothing is waited for on the host: each step is enqueued whole, in the order of messages,
which is the same on every rank, on the CUDA stream of its lane.

A step that fails breaks the rank: the steps of every lane fail with it.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from tknp.engine.batch import Delta
from tknp.engine.decode import DecodeRank, Outcome
from tknp.layout.program import Kind
from tknp.transport.base import Work

_SPINS = 100  # polls without leaving the core
_YIELD_S = 0.002  # then this long of polling and yielding
_SLEEP_S = 0.000_05  # then sleeps


@dataclass
class _Submitted:
    delta: Delta
    future: Future[Outcome]
    order: int


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
        self._arrivals: queue.SimpleQueue[_Submitted] = queue.SimpleQueue()
        self._arrived = 0

    def submit(self, delta: Delta) -> Future[Outcome]:
        """Queue a step; `run` has to be called once more for it."""
        future: Future[Outcome] = Future()
        self._arrived += 1
        self._arrivals.put(_Submitted(delta, future, self._arrived))
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
            ready = [lane for lane in busy if self._ready(lane)]
            ready = [lane for lane in ready if lane.queue]  # none if one has failed
            if ready:
                self._advance(min(ready, key=self._urgency))
                idle = _Pause()
            else:
                idle.wait()

    def _take_arrivals(self) -> None:
        while not self._arrivals.empty():
            submitted = self._arrivals.get()
            lane = self._lanes.get(submitted.delta.stream)
            if lane is None:
                lane = next(iter(self._lanes.values()))  # whose step then fails with the reason
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

    def _ready(self, lane: _Lane) -> bool:
        try:
            return lane.work is None or lane.work.done()
        except Exception as error:
            self._fail(lane, error)
            return False

    def _urgency(self, lane: _Lane) -> tuple[bool, int]:
        op = self._rank.at(lane.stream) if lane.running is not None else None
        # After a scatter that has arrived comes attention; after anything else, or first, dense.
        attends = op is not None and op.kind is Kind.SCATTER
        return attends, lane.queue[0].order

    def _advance(self, lane: _Lane) -> None:
        """Go on with the step of `lane` until it waits for something that has not happened."""
        submitted = lane.queue[0]
        try:
            if lane.running is None:
                lane.running = self._rank.steps(submitted.delta)
            with lane.context():
                while lane.work is None or lane.work.done():
                    if lane.work is not None:
                        lane.work.wait()
                    lane.work = next(lane.running)
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
