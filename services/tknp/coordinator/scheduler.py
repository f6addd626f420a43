"""Iteration-level scheduling with capacity-aware ownership. Pure: no clock, no sockets.

Requests are placed in the order of `tknp.coordinator.waiting`. The first that fits nowhere waits,
and those behind it wait too. A placed request has its pages counted at each of its owners until
every rank that it ran on is past its last step. Streams (`tknp.coordinator.stream`) share queue and
nodes; a request is in one of them from placement on.

With `reserve_ratio` below 1 a request is placed with part of its output only, and gets pages as it
comes near their end (`tknp.coordinator.growth`). Where none are left the youngest of those that
were placed so leaves the batch and waits for another attempt, which computes what it has anew and
has room for all of its output: no request makes room for another twice.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tknp.coordinator.growing import Growing
from tknp.coordinator.growth import Growth
from tknp.coordinator.ledger import Ledger
from tknp.coordinator.limits import Limits
from tknp.coordinator.placement import Place, Seat, choose
from tknp.coordinator.request import NOWHERE, Request, Stage
from tknp.coordinator.stream import LOOKAHEAD_TOKENS, STEPS_IN_FLIGHT, Stream
from tknp.coordinator.waiting import Waiting
from tknp.engine.batch import Delta
from tknp.errors import CapacityError, ProtocolError
from tknp.kv.holding import Key
from tknp.layout.owners import NodeLoad
from tknp.v1.common_pb2 import FinishReason


class Taken(NamedTuple):
    """Row `row` of a step gave `request` a token, the last one if `finish` says why."""

    row: int
    request: Request
    finish: FinishReason.ValueType | None


class Scheduler:
    """All requests of a pool. `preemptions`: requests so far that made room for another."""

    def __init__(self, limits: Limits, epoch: int) -> None:
        self.limits = limits
        self.waiting = Waiting()
        self.placed: set[Request] = set()
        self.preemptions = 0
        nodes = len(limits.pages)
        self.streams = [
            Stream(number, epoch, limits.max_batch, nodes)
            for number in range(len(limits.division.streams))
        ]
        self._arrived = 0
        self._live: dict[Request, None] = {}
        self._ledger = Ledger(limits.pages)
        self._held_back: list[Request] = []
        self._released = not limits.hold_until
        self._growing = Growing(limits.division, self._ledger, self.streams, self._preempt)

    @property
    def loads(self) -> list[NodeLoad]:
        """Pages of each node; reserved and withheld ones are used."""
        return self._ledger.loads

    @property
    def live(self) -> list[Request]:
        """Every request that has not ended, in order of arrival."""
        return list(self._live)

    @property
    def idle(self) -> bool:
        """Whether every request has ended."""
        return not self._live

    @property
    def running(self) -> int:
        """Requests in running batches, those that join next among them."""
        joining = len(self._held_back) + sum(len(stream.ready) for stream in self.streams)
        return joining + sum(len(stream.running) for stream in self.streams)

    @property
    def steps(self) -> int:
        """Steps launched so far, of all streams."""
        return sum(stream.steps for stream in self.streams)

    def owned_requests(self, node: int) -> int:
        return sum(stream.requests[node] for stream in self.streams)

    def kv_tokens(self, node: int) -> int:
        """Tokens whose KV `node` keeps, or part of it, for running requests."""
        running = (r for stream in self.streams for r in stream.running.values())
        return sum(self._tokens_at(node, r) for r in running if node in r.owners)

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
        """Give owners and slots to waiting requests, in order, for as long as they fit.

        None while a running request waits for a page: it goes first.
        """
        placed: list[Request] = []
        if self._growing.starving:
            return placed
        while self.waiting and any(stream.slots for stream in self.streams):
            request = self.waiting.head
            place = self._choose(request)
            if place is None:
                break
            self.waiting.remove(request)
            self._take(request, place)
            placed.append(request)
        return placed

    def unplace(self, request: Request) -> None:
        """The owners hold nothing of this attempt (any more): the next waits for its turn."""
        self.placed.remove(request)
        self._give_slot(request)
        self._free(request)
        self._wait_again(request)

    def first_token(self, request: Request, token: int) -> FinishReason.ValueType | None:
        """Prefill has sampled `token`. Unless that ends the request, it joins the next step."""
        self.placed.remove(request)
        finish = self._append(request, token)
        if finish is not None:
            self._give_slot(request)
            return finish
        request.stage = Stage.READY
        if request.pinned is not None or self._released:
            self.streams[request.stream].ready.append(request)
        else:
            self._held_back.append(request)
        return None

    def delta(self, stream: int = 0) -> Delta | None:
        """What the next step of `stream` changes.

        None while enough steps are in flight, when nothing runs and nothing has to leave, and while
        an owner is being asked for a page without which a row has no room.
        """
        state = self.streams[stream]
        if len(state.in_flight) >= STEPS_IN_FLIGHT:
            return None
        short = state.short()
        if any(map(self._growing.pending, short)):
            return None
        for request in short:
            self._preempt(request)
        self._release()
        return state.delta()

    def tokens(
        self, step: int, slots: Sequence[int], ids: Sequence[int | None], stream: int = 0
    ) -> list[Taken]:
        """What every row of `step` drew; None where a row failed, which ends its request.

        Rows of requests that had ended before are left out. Raises ProtocolError unless the rows
        are those that the step was launched with.
        """
        rows = None
        if 0 <= stream < len(self.streams):
            rows = self.streams[stream].in_flight.pop(step, None)
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

    def finished(self, step: int, stream: int = 0) -> None:
        """Every rank has finished `step`: pages of requests that left before it are free."""
        for request in self.streams[stream].left(step):
            self._free(request)
            if request.stage is Stage.PREEMPTED:
                self._wait_again(request)

    def freed(self, request: Request) -> None:
        """The owners have released the pages of a request that no step had admitted."""
        self._free(request)

    def withhold(self, node: int, pages: int) -> None:
        """`node` has `pages` that no request holds and that it can't give either (quarantine)."""
        self._ledger.withhold(node, pages)

    def growths(self) -> list[Growth]:
        """What to ask of owners now, for requests near the end of their pages; see `grew`."""
        return self._growing.ask()

    def grew(self, growth: Growth, given: Collection[int]) -> bool:
        """The nodes `given` of `growth.nodes` have given their page; whether the request has them.

        If not, because it has left the batch or a node refused, the caller has to release what
        `growth.further` gave, and then to call `shrunk`.
        """
        return self._growing.answered(growth, given)

    def shrunk(self, growth: Growth) -> None:
        """`growth.further` has released what it gave in vain."""
        self._growing.shrunk(growth)

    def end(self, request: Request) -> Stage:
        """Cancelled or failed; returns the stage it had.

        From PLACED and READY the caller must release its pages at the owners and call `freed`.
        """
        stage = request.stage
        if stage is Stage.ENDED:
            return stage
        self._end(request)
        if stage is Stage.QUEUED:
            self.waiting.remove(request)
        elif stage is Stage.PLACED:
            self.placed.remove(request)
            self._give_slot(request)
        elif stage is Stage.READY:
            held_back = request in self._held_back
            (self._held_back if held_back else self.streams[request.stream].ready).remove(request)
            self._give_slot(request)
        return stage

    def overdue(self, now_s: float) -> list[Request]:
        """Requests whose deadline has passed; the caller ends them."""
        return [request for request in self._live if request.deadline_s <= now_s]

    def reserved_tokens(self, request: Request) -> list[int]:
        """Tokens that each owner of a request just placed has to have room for, at least one."""
        if self.limits.division.divides != "tokens":
            return [self._asked(request)] * len(request.owners)
        shards = range(len(request.owners))
        return [max(1, request.shares.length(i, self._asked(request))) for i in shards]

    def _asked(self, request: Request) -> int:
        """Tokens to reserve at placement, of `most_tokens`."""
        ratio = 1.0 if request.preemptions else self.limits.reserve_ratio
        output = math.ceil(ratio * (request.most_tokens - request.tokens))
        return min(request.most_tokens, request.tokens + max(output, 1 + LOOKAHEAD_TOKENS))

    def _choose(self, request: Request) -> Place | None:
        seats = [Seat(len(stream.slots), stream.requests) for stream in self.streams]
        return choose(self.limits.division, self.loads, seats, request, self._asked(request))

    def _take(self, request: Request, place: Place) -> None:
        stream = self.streams[place.stream]
        request.stream, request.slot = place.stream, stream.slots.pop()
        request.owners, request.shares = place.owners, place.shares
        request.held = dict(zip(place.owners, place.pages, strict=True))
        request.stage = Stage.PLACED
        self._ledger.take(request.held)
        for node in request.owners:
            stream.requests[node] += 1
        request.cover(self.limits.division)
        self.placed.add(request)

    def _free(self, request: Request) -> None:
        self._ledger.give(request.held)
        for node in request.owners:
            self.streams[request.stream].requests[node] -= 1
        request.held = {}

    def _give_slot(self, request: Request) -> None:
        self.streams[request.stream].slots.append(request.slot)

    def _wait_again(self, request: Request) -> None:
        request.key = Key(request.key.request_id, request.key.attempt + 1)
        request.stage, request.stream, request.slot = Stage.QUEUED, -1, -1
        request.owners, request.shares = (), NOWHERE
        self.waiting.add(request)

    def _end(self, request: Request) -> None:
        leaves = request.stage is Stage.RUNNING
        request.stage = Stage.ENDED
        del self._live[request]
        if leaves:
            self.streams[request.stream].leave(request)
        if self.limits.hold_until and not self._live:
            self._released = False

    def _preempt(self, request: Request) -> None:
        """`request` runs; it leaves with the next step and is computed again later."""
        request.stage = Stage.PREEMPTED
        request.preemptions += 1
        self.preemptions += 1
        self.streams[request.stream].leave(request)

    def _release(self) -> None:
        """Let held requests join once so many have come and all that fit are ready."""
        if self._released or self.placed:
            return
        if len(self._held_back) + len(self.waiting) < self.limits.hold_until:
            return
        if self.waiting and self._choose(self.waiting.head) is not None:
            return
        self._released = True
        for request in self._held_back:
            self.streams[request.stream].ready.append(request)
        self._held_back.clear()

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

    def _tokens_at(self, node: int, request: Request) -> int:
        shard = request.shares.shard_of(node)
        if self.limits.division.divides != "tokens" or shard is None:
            return request.tokens
        return request.shares.length(shard, request.tokens)
