"""Rows and steps of one stream: a microbatch, or a replica of DP. Pure.

A step is launched before the tokens of the one before are known. A request that must end by length
leaves in time, without a wasted row: the step it leaves at is known when it is admitted. One that
ends by a token runs one more row, and its token is discarded. No call costs more than what changes.

The step at which a request comes near the end of its pages is known just as early (`hungry`). One
that has come to their end leaves: a row is never fed without a slot to append to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection

from tknp.coordinator.request import Request, Stage
from tknp.engine.batch import Admit, Delta, Grow

STEPS_IN_FLIGHT = 2
# Steps between the first request for more pages and the row that needs them.
LOOKAHEAD_TOKENS = 8


class Stream:
    """What runs in stream `number`; the scheduler decides what joins."""

    def __init__(self, number: int, epoch: int, max_batch: int, nodes: int) -> None:
        self.number = number
        self.steps = 0
        self.running: dict[int, Request] = {}
        self.ready: deque[Request] = deque()
        self.hungry: dict[Request, None] = {}
        self.slots = list(range(max_batch - 1, -1, -1))
        self.requests = [0] * nodes
        self.in_flight: dict[int, dict[int, Request]] = {}
        self._epoch = epoch
        self._leaving: dict[int, list[Request]] = {}
        self._full_at: defaultdict[int, list[Request]] = defaultdict(list)
        self._hungry_at: defaultdict[int, list[Request]] = defaultdict(list)
        self._gone: list[Request] = []
        self._grown: dict[Request, None] = {}

    def runs(self, request: Request) -> bool:
        return self.running.get(request.slot) is request

    def leave(self, request: Request) -> None:
        """The next step is without `request`, which runs."""
        self._gone.append(request)
        self.hungry.pop(request, None)

    def grow(self, request: Request) -> None:
        """The next step tells its ranks what `request` has now, and it is fed on."""
        self._grown[request] = None
        self.feed(request)

    def feed(self, request: Request) -> None:
        """Note when `request`, which runs or joins, comes near the end of its pages."""
        self.hungry.pop(request, None)
        if request.covered < request.most_tokens - 1:  # it leaves before the last is fed
            due = request.covered - request.joined - LOOKAHEAD_TOKENS
            if due < self.steps:
                self.hungry[request] = None
            else:
                self._hungry_at[due].append(request)

    def short(self) -> list[Request]:
        """Requests that have no room for the row that the next step would feed."""
        if not self.hungry:
            return []
        return [r for r in self.hungry if r.joined + self.steps >= r.covered]

    def delta(self) -> Delta | None:
        """What the next step changes; None when nothing runs and nothing has to leave."""
        step = self.steps
        full = [r for r in self._full_at.pop(step, ()) if r.joined + step == r.most_tokens - 1]
        leaving = [r for r in dict.fromkeys([*self._gone, *full]) if self.runs(r)]
        self._gone.clear()
        if not self.running and not self.ready:
            return None
        joining = list(self.ready)
        self.ready.clear()
        self.steps += 1
        admits = [self._admit(request, step) for request in joining]
        staying = [r for r in self._grown if self.runs(r) and r not in leaving]
        grows = [Grow(r.slot, r.shares) for r in staying]
        self._grown.clear()
        if leaving or admits:
            # Steps in flight keep the rows they were launched with.
            rows = dict(self.running)
            for request in leaving:
                self.hungry.pop(request, None)
                del rows[request.slot]
                self.slots.append(request.slot)
            rows.update((request.slot, request) for request in joining)
            self.running = rows
        for request in self._hungry_at.pop(step, ()):
            near = request.joined + step + LOOKAHEAD_TOKENS >= request.covered
            if near and self.runs(request) and request.stage is Stage.RUNNING:
                self.hungry[request] = None
        self.in_flight[step] = self.running
        self._leaving[step] = leaving
        ends = tuple(request.slot for request in leaving)
        return Delta(self._epoch, self.number, step, ends, tuple(admits), tuple(grows))

    @property
    def departing(self) -> list[Request]:
        """Requests that have left or will with the next step, and hold pages until then."""
        return [*self._gone, *(r for left in self._leaving.values() for r in left)]

    def left(self, step: int) -> Collection[Request]:
        """Every rank has finished `step`: the requests that left with it."""
        return self._leaving.pop(step)

    def _admit(self, request: Request, step: int) -> Admit:
        request.stage = Stage.RUNNING
        count = len(request.generated)
        position = request.tokens - 1
        request.joined = position - step
        self._full_at[step + request.params.max_tokens - count].append(request)
        self.feed(request)
        history = request.params.needs_history
        return Admit(
            slot=request.slot,
            key=request.key,
            owners=request.owners,
            shares=request.shares,
            position=position,
            token=request.generated[-1],
            sampling=request.params,
            prompt=tuple(request.prompt) if history else (),
            generated=tuple(request.generated) if request.params.needs_output else (),
            generated_count=count,
        )
