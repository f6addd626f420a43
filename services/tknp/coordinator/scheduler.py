"""Iteration-level scheduling with capacity-aware ownership. Pure: no clock, no sockets.

Requests are placed in the order of `tknp.coordinator.waiting`. The first that fits nowhere waits,
and those behind it wait too. A placed request has its pages counted against its owner until every
rank of the owner is past its last step.

A step is launched before the tokens of the one before are known. A request that must end by length
leaves in time, without a wasted row: the step it leaves at is known when it is admitted. One that
ends by a token runs one more row, and its token is discarded. No call costs more than what changes,
except `tokens`, which costs one turn a row.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from tknp.coordinator.limits import Limits
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.waiting import Waiting
from tknp.engine.batch import Admit, Delta
from tknp.errors import CapacityError, ProtocolError
from tknp.kv.holding import Key
from tknp.kv.size import pages_for
from tknp.layout.owners import NodeLoad, choose_owner
from tknp.v1.common_pb2 import FinishReason

STEPS_IN_FLIGHT = 2


class Taken(NamedTuple):
    """Row `row` of a step gave `request` a token, the last one if `finish` says why."""

    row: int
    request: Request
    finish: FinishReason.ValueType | None


class Scheduler:
    """All requests of one stream."""

    def __init__(self, limits: Limits, epoch: int, stream: int = 0) -> None:
        self.limits = limits
        self.waiting = Waiting()
        self.placed: set[Request] = set()
        self.ready: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.steps = 0
        self._epoch = epoch
        self._stream = stream
        self._arrived = 0
        self._live: dict[Request, None] = {}
        nodes = len(limits.pages)
        self._used, self._withheld, self._requests = [0] * nodes, [0] * nodes, [0] * nodes
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._in_flight: dict[int, dict[int, Request]] = {}
        self._leaving: dict[int, list[Request]] = {}
        self._full_at: defaultdict[int, list[Request]] = defaultdict(list)
        self._ended: list[Request] = []

    @property
    def loads(self) -> list[NodeLoad]:
        """Pages of each node; reserved and withheld ones are used."""
        taken = zip(self.limits.pages, self._used, self._withheld, strict=True)
        return [NodeLoad(pages, used + withheld) for pages, used, withheld in taken]

    @property
    def live(self) -> list[Request]:
        """Every request that has not ended, in order of arrival."""
        return list(self._live)

    @property
    def in_flight(self) -> int:
        """Steps launched whose tokens are not known."""
        return len(self._in_flight)

    def owned_requests(self, node: int) -> int:
        return self._requests[node]

    def kv_tokens(self, node: int) -> int:
        """Tokens whose KV `node` keeps for running requests."""
        mine = [r for r in self.running.values() if r.owner == node]
        return sum(len(r.prompt) + len(r.generated) for r in mine)

    def submit(self, request: Request) -> None:
        """Queue a checked request. Raises CapacityError when the queue is full."""
        if len(self.waiting) >= self.limits.max_queue:
            raise CapacityError(
                f"{len(self.waiting)} requests wait already, max_queue={self.limits.max_queue}: "
                "come again later"
            )
        params = request.params
        eos = frozenset() if params.ignore_eos else self.limits.eos_ids
        request.stops = eos.union(params.stop_token_ids)
        request.order = self._arrived
        self._arrived += 1
        self._live[request] = None
        self.waiting.add(request)

    def place(self) -> list[Request]:
        """Give owners and slots to waiting requests, in order, for as long as they fit."""
        placed = []
        while self.waiting and self._free_slots:
            request = self.waiting.head
            need = self._need(request)
            owner = self._owner(request, need)
            if owner is None:
                break
            self.waiting.remove(request)
            request.owner, request.slot = owner, self._free_slots.pop()
            request.stage = Stage.PLACED
            self._used[owner] += need
            self._requests[owner] += 1
            self.placed.add(request)
            placed.append(request)
        return placed

    def unplace(self, request: Request) -> None:
        """The owner holds nothing of this attempt (any more): the next one waits for its turn."""
        self.placed.remove(request)
        self._free_slots.append(request.slot)
        self._free(request)
        request.key = Key(request.key.request_id, request.key.attempt + 1)
        request.stage, request.owner, request.slot = Stage.QUEUED, -1, -1
        self.waiting.add(request)

    def first_token(self, request: Request, token: int) -> FinishReason.ValueType | None:
        """Prefill has sampled `token`. Unless that ends the request, it joins the next step."""
        self.placed.remove(request)
        finish = self._append(request, token)
        if finish is None:
            request.stage = Stage.READY
            self.ready.append(request)
        else:
            self._free_slots.append(request.slot)
        return finish

    def delta(self) -> Delta | None:
        """What the next step changes.

        None while enough steps are in flight, and when nothing runs and nothing has to leave.
        """
        if len(self._in_flight) >= STEPS_IN_FLIGHT:
            return None
        step = self.steps
        due = [*self._ended, *self._full_at.pop(step, ())]
        leaving = [request for request in dict.fromkeys(due) if self._runs(request)]
        self._ended.clear()
        joining = self._joining()
        if not self.running and not joining:
            return None
        admits = [self._admit(request, step) for request in joining]
        if leaving or admits:
            # Steps in flight keep the rows they were launched with.
            rows = dict(self.running)
            for request in leaving:
                del rows[request.slot]
                self._free_slots.append(request.slot)
            rows.update((request.slot, request) for request in joining)
            self.running = rows
            self.ready = deque(r for r in self.ready if r.stage is Stage.READY)
        self.steps += 1
        self._in_flight[step] = self.running
        self._leaving[step] = leaving
        ends = tuple(request.slot for request in leaving)
        return Delta(self._epoch, self._stream, step, ends, tuple(admits))

    def tokens(self, step: int, slots: Sequence[int], ids: Sequence[int | None]) -> list[Taken]:
        """What every row of `step` drew; None where a row failed, which ends its request.

        Rows of requests that had ended before are left out. Raises ProtocolError unless the rows
        are those that the step was launched with.
        """
        rows = self._in_flight.pop(step, None)
        if rows is None or len(slots) != len(rows) or not rows.keys() >= set(slots):
            asked = "no such step" if rows is None else f"slots {sorted(rows)}"
            raise ProtocolError(f"step {step} answers for slots {sorted(slots)}, asked: {asked}")
        taken = []
        for row, (slot, token) in enumerate(zip(slots, ids, strict=True)):
            request = rows[slot]
            if request.ended:
                continue
            finish = None
            if token is None:
                self._end(request)
            else:
                finish = self._append(request, token)
            taken.append(Taken(row, request, finish))
        return taken

    def finished(self, step: int) -> None:
        """Every rank has finished `step`: pages of requests that left before it are free."""
        for request in self._leaving.pop(step):
            self._free(request)

    def freed(self, request: Request) -> None:
        """The owner has released the pages of a request that no step had admitted."""
        self._free(request)

    def withhold(self, node: int, pages: int) -> None:
        """`node` has `pages` that no request holds and that it can't give either (quarantine)."""
        self._withheld[node] = pages

    def end(self, request: Request) -> Stage:
        """Cancelled or failed; returns the stage it had.

        From PLACED and READY the caller must release its pages at the owner and call `freed`.
        """
        stage = request.stage
        if stage is Stage.ENDED:
            return stage
        self._end(request)
        if stage is Stage.QUEUED:
            self.waiting.remove(request)
        elif stage is Stage.PLACED:
            self.placed.remove(request)
            self._free_slots.append(request.slot)
        elif stage is Stage.READY:
            self.ready.remove(request)
            self._free_slots.append(request.slot)
        return stage

    def overdue(self, now_s: float) -> list[Request]:
        """Requests whose deadline has passed; the caller ends them."""
        return [request for request in self._live if request.deadline_s <= now_s]

    def _end(self, request: Request) -> None:
        request.stage = Stage.ENDED
        del self._live[request]
        if self._runs(request):
            self._ended.append(request)

    def _runs(self, request: Request) -> bool:
        return self.running.get(request.slot) is request

    def _free(self, request: Request) -> None:
        self._used[request.owner] -= self._need(request)
        self._requests[request.owner] -= 1

    def _owner(self, request: Request, need: int) -> int | None:
        if request.pinned is None:
            return choose_owner(self.loads, need)
        return request.pinned if self.loads[request.pinned].free >= need else None

    def _need(self, request: Request) -> int:
        return pages_for(request.tokens_reserved, self.limits.page_size)

    def _joining(self) -> list[Request]:
        """Ready requests that the next step admits. The warm-up's are never held."""
        pinned = [request for request in self.ready if request.pinned is not None]
        held = len(self.ready) - len(pinned) < self.limits.hold_until
        return pinned if held else list(self.ready)

    def _append(self, request: Request, token: int) -> FinishReason.ValueType | None:
        request.generated.append(token)
        if token in request.stops:
            finish = FinishReason.FINISH_REASON_STOP
        elif len(request.generated) >= request.params.max_tokens:
            finish = FinishReason.FINISH_REASON_LENGTH
        else:
            return None
        self._end(request)
        return finish

    def _admit(self, request: Request, step: int) -> Admit:
        request.stage = Stage.RUNNING
        count = len(request.generated)
        self._full_at[step + request.params.max_tokens - count].append(request)
        history = request.params.needs_history
        return Admit(
            slot=request.slot,
            key=request.key,
            owner=request.owner,
            position=len(request.prompt) + count - 1,
            token=request.generated[-1],
            sampling=request.params,
            prompt=tuple(request.prompt) if history else (),
            generated=tuple(request.generated) if history else (),
            generated_count=count,
        )
