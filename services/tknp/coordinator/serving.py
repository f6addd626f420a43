"""A pool that runs: carries out what the scheduler decides, and tells clients what became of it.

    placing   queue -> owner -> prefill -> first token           `Placer`
    stepping  delta -> every node; tokens -> requests' events    `StepCalls`, here
    growing   more pages for requests that run                   `Placer`

Both run on the event loop and share the scheduler, so nothing is locked. A result that comes in is
taken, the next step is sent, and only then do clients hear of their tokens: what a hundred streams
do with a token never delays a step. An end of one request (cancelled, overdue, failed) touches no
other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from tknp.coordinator.metrics import CoordinatorMetrics
from tknp.coordinator.placing import Placer
from tknp.coordinator.request import Event, Request
from tknp.coordinator.scheduler import Scheduler
from tknp.coordinator.startup import Peers
from tknp.coordinator.steps import StepCalls
from tknp.errors import DeadlineExceeded, TknpError, Unavailable
from tknp.pool import Pool
from tknp.v1.common_pb2 import FinishReason, Token
from tknp.v1.step_pb2 import StepResult

log = logging.getLogger(__name__)
_DEADLINE_TICK_S = 0.1


@dataclass
class Counts:
    """How requests have ended so far; those of the warm-up are left out."""

    completed: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0


class Serving:
    """`lost(reason)` is called when the steps can't go on. `run` has to run beside."""

    def __init__(
        self,
        pool: Pool,
        peers: Peers,
        scheduler: Scheduler,
        counts: Counts,
        metrics: CoordinatorMetrics,
        clock: Callable[[], float],
        lost: Callable[[str], None],
    ) -> None:
        self.scheduler = scheduler
        self._counts = counts
        self._metrics = metrics
        self._clock = clock
        self._placer = Placer(
            pool, peers, scheduler, clock,
            first_token=self._first_token, failed=self.fail_request, grown=self._work,
        )  # fmt: skip
        self.replicas = self._placer.replicas
        leaders = [ranks[0] for ranks in peers.nodes]
        self._calls = StepCalls(pool.layout, leaders, self._answered, lost)
        self._ended = asyncio.Event()
        self._came = asyncio.Event()

    async def run(self) -> None:
        """Place requests and watch deadlines for as long as the pool lives."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._placer.run())
            group.create_task(self._watch_deadlines())

    async def idle(self) -> None:
        """Wait until every request has ended."""
        while self.scheduler.live:
            self._ended.clear()
            await self._ended.wait()

    def close(self) -> None:
        self._calls.close()
        self._placer.close()

    def submit(self, request: Request) -> None:
        """Queue a checked request. Raises CapacityError when the queue is full."""
        self.scheduler.submit(request)
        self._came.set()
        self._work()

    def cancel(self, request: Request) -> None:
        """The client is gone. Harmless if the request has ended."""
        if not request.ended:
            self._counts.cancelled += 1
            self._end(request)

    def complete(self, request: Request) -> None:
        """Its text has ended at a stop string. Harmless if the request has ended."""
        if not request.ended:
            self._counts.completed += 1
            self._metrics.completed(request, self._clock())
            self._end(request)

    def fail_all(self, reason: str) -> None:
        for request in self.scheduler.live:
            self.fail_request(request, Unavailable(reason))

    def fail_request(self, request: Request, error: TknpError) -> None:
        """End `request` with `error`. Harmless if it has ended."""
        if not request.ended:
            self._end(request)
            self._tell_failure(request, error)

    async def _watch_deadlines(self) -> None:
        while True:
            await self._came.wait()  # an idle pool doesn't tick
            await asyncio.sleep(_DEADLINE_TICK_S)
            for request in self.scheduler.overdue(self._clock()):
                allowed_s = request.deadline_s - request.arrived_s
                why = f"not done within {allowed_s:.3g} s: it was still {request.stage}"
                self.fail_request(request, DeadlineExceeded(why))
            if self.scheduler.idle:
                self._came.clear()

    def _first_token(self, request: Request, token: Token) -> None:
        if token.error:
            self.fail_request(request, TknpError(token.error))
            return
        request.first_token_s = request.first_token_s or self._clock()
        finish = self.scheduler.first_token(request, token.token_id)
        self._work()
        self._emit(request, token, finish)

    def _answered(self, result: StepResult, drawn: bool, last: bool) -> None:
        """A node has answered a step: with its tokens if `drawn`, as the `last` of all or not."""
        if drawn:
            self._take(result, last)
        elif last:
            self.scheduler.finished(result.step, result.stream)
            self._work()

    def _take(self, result: StepResult, last: bool) -> None:
        began = perf_counter()
        tokens = list(result.tokens)
        ids = [None if token.error else token.token_id for token in tokens]
        taken = self.scheduler.tokens(result.step, list(result.slots), ids, result.stream)
        if last:
            self.scheduler.finished(result.step, result.stream)
        self._work()
        launched = perf_counter()
        for row, request, finish in taken:
            if ids[row] is None:
                self._tell_failure(request, TknpError(tokens[row].error))
            else:
                self._emit(request, tokens[row], finish)
        self._metrics.step(launched - began, perf_counter() - launched)

    def _work(self) -> None:
        """Something has changed: launch, grow and place what can be."""
        for stream in range(len(self.scheduler.streams)):
            while (delta := self.scheduler.delta(stream)) is not None:
                self._calls.send(delta)
        for growth in self.scheduler.growths():
            self._placer.grow(growth)
        self._placer.room()

    def _emit(self, request: Request, token: Token, finish: FinishReason.ValueType | None) -> None:
        self._metrics.token(request, self._clock(), finish is not None)
        request.untold.append(token)
        first = len(request.generated) - request.given == 1
        if first or finish is not None or len(request.untold) >= request.together:
            request.events.put_nowait(Event(tuple(request.untold), finish))
            request.untold = []
        if finish is not None:
            if request.pinned is None:
                self._counts.completed += 1
            self._ended.set()

    def _tell_failure(self, request: Request, error: TknpError) -> None:
        self._counts.failed += 1
        named = f" ({request.name!r} of its client)" if request.name else ""
        log.warning("request %s%s failed: %s", request.key, named, error)
        request.events.put_nowait(Event(error=error))
        self._ended.set()

    def _end(self, request: Request) -> None:
        self._placer.ended(request, self.scheduler.end(request))
        self._ended.set()
        self._work()
