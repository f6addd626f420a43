"""Iteration-level scheduling with capacity-aware ownership. Pure: no clock, no sockets.

Requests are placed in order of arrival. The first that fits nowhere waits, and those behind it wait
too, so that none starves. A placed request has its pages counted against its owner until every rank
of the owner is past its last step.

A step is launched before the tokens of the one before are known. A request that must end by length
leaves in time, without a wasted row; one that ends by a token runs one more row, and its token is
discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tknp.coordinator.request import Request, Stage
from tknp.engine.batch import Admit, Delta
from tknp.errors import CapacityError, InvalidValue, ProtocolError
from tknp.kv.size import pages_for
from tknp.layout.owners import NodeLoad, choose_owner
from tknp.v1.common_pb2 import FinishReason


@dataclass(frozen=True)
class Limits:
    """What the pool can take. `max_prompt_tokens`: what every prefill replica can hold."""

    page_size: int
    max_batch: int
    max_queue: int
    max_model_len: int
    max_prompt_tokens: int
    eos_ids: frozenset[int]


class Scheduler:
    """`pages`: that each node can give to requests."""

    def __init__(self, pages: Sequence[int], limits: Limits, epoch: int, stream: int = 0) -> None:
        self.limits = limits
        self.queue: deque[Request] = deque()
        self.placed: set[Request] = set()
        self.ready: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        self.steps = 0
        self._pages = tuple(pages)
        self._used = [0] * len(pages)
        self._requests = [0] * len(pages)
        self._epoch = epoch
        self._stream = stream
        self._free_slots = list(range(limits.max_batch - 1, -1, -1))
        self._in_flight: dict[int, dict[int, Request]] = {}
        self._leaving: dict[int, list[Request]] = {}

    @property
    def loads(self) -> list[NodeLoad]:
        """Pages of each node, reserved ones as used."""
        return [NodeLoad(p, u) for p, u in zip(self._pages, self._used, strict=True)]

    @property
    def longest(self) -> int:
        """Most tokens, prompt plus output, that a request may have."""
        return min(self.limits.max_model_len, max(self._pages) * self.limits.page_size)

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

    def check(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Output limit of a request; raises InvalidValue if no node could ever hold it."""
        if prompt_tokens < 1:
            raise InvalidValue("prompt", "", "must have at least one token")
        longest_prompt = min(self.longest - 1, self.limits.max_prompt_tokens)
        if prompt_tokens > longest_prompt:
            raise InvalidValue(
                "prompt", f"{prompt_tokens} tokens",
                f"this pool takes at most {longest_prompt} and one of output",
            )  # fmt: skip
        room = self.longest - prompt_tokens
        if max_tokens is not None and max_tokens > room:
            raise InvalidValue(
                "max_tokens", max_tokens,
                f"at most {room} after a prompt of {prompt_tokens} tokens: one node of this pool "
                f"holds {self.longest} in all",
            )  # fmt: skip
        return room if max_tokens is None else max_tokens

    def submit(self, request: Request) -> None:
        """Queue a checked request. Raises CapacityError when the queue is full."""
        if len(self.queue) >= self.limits.max_queue:
            raise CapacityError(f"{len(self.queue)} requests wait already: come again later")
        self.queue.append(request)

    def place(self) -> list[Request]:
        """Give owners and slots to waiting requests, in order, for as long as they fit."""
        placed = []
        while self.queue and len(self._free_slots) > 0:
            request = self.queue[0]
            need = self._need(request)
            owner = self._owner(request, need)
            if owner is None:
                break
            self.queue.popleft()
            request.owner, request.slot = owner, self._free_slots.pop()
            request.stage = Stage.PLACED
            self._used[owner] += need
            self._requests[owner] += 1
            self.placed.add(request)
            placed.append(request)
        return placed

    def unplace(self, request: Request) -> None:
        """The owner had no room after all: the request is next in line again."""
        self.placed.discard(request)
        self._free_slots.append(request.slot)
        self.freed(request)
        request.stage, request.owner, request.slot = Stage.QUEUED, -1, -1
        self.queue.appendleft(request)

    def first_token(self, request: Request, token: int) -> FinishReason.ValueType | None:
        """Prefill has sampled `token`. Unless that ends the request, it joins the next step."""
        self.placed.discard(request)
        request.issued = 1
        finish = self._append(request, token)
        if finish is None:
            request.stage = Stage.READY
            self.ready.append(request)
        else:
            self._free_slots.append(request.slot)
        return finish

    def delta(self) -> Delta | None:
        """What the next step changes, or None when nothing runs and nothing has to end."""
        leaving = [
            r
            for r in self.running.values()
            if r.stage is Stage.ENDED or r.issued >= r.params.max_tokens
        ]
        for request in leaving:
            del self.running[request.slot]
            self._free_slots.append(request.slot)
        admits = []
        while self.ready:
            request = self.ready.popleft()
            request.stage = Stage.RUNNING
            self.running[request.slot] = request
            admits.append(_admit(request))
        if not self.running and not leaving:
            return None
        for request in self.running.values():
            request.issued += 1
        step = self.steps
        self.steps += 1
        self._in_flight[step] = dict(self.running)
        self._leaving[step] = leaving
        ends = tuple(request.slot for request in leaving)
        return Delta(self._epoch, self._stream, step, ends, tuple(admits))

    def token(
        self, step: int, slot: int, token: int
    ) -> tuple[Request, FinishReason.ValueType | None] | None:
        """The row of `slot` in `step` drew `token`. None if the request has ended before."""
        request = self._row(step, slot)
        if request.stage is Stage.ENDED:
            return None
        return request, self._append(request, token)

    def row_failed(self, step: int, slot: int) -> Request | None:
        """The row of `slot` in `step` drew nothing: its request ends."""
        request = self._row(step, slot)
        if request.stage is Stage.ENDED:
            return None
        request.stage = Stage.ENDED
        return request

    def sampled(self, step: int) -> None:
        """Every token of `step` has been taken."""
        del self._in_flight[step]

    def finished(self, step: int) -> None:
        """Every rank has finished `step`: pages of requests that left before it are free."""
        for request in self._leaving.pop(step):
            self.freed(request)

    def freed(self, request: Request) -> None:
        """The owner has the request's pages back."""
        self._used[request.owner] -= self._need(request)
        self._requests[request.owner] -= 1

    def end(self, request: Request) -> bool:
        """Cancelled or failed. True if the caller must release its pages at the owner."""
        stage, request.stage = request.stage, Stage.ENDED
        if stage is Stage.QUEUED:
            self.queue.remove(request)
        elif stage is Stage.PLACED:
            self.placed.discard(request)
            self._free_slots.append(request.slot)
        elif stage is Stage.READY:
            self.ready.remove(request)
            self._free_slots.append(request.slot)
        return stage in (Stage.PLACED, Stage.READY)

    def live(self) -> list[Request]:
        """Every request that has not ended."""
        running = [r for r in self.running.values() if r.stage is not Stage.ENDED]
        flying = [r for rows in self._in_flight.values() for r in rows.values()]
        late = [r for r in flying if r.stage is not Stage.ENDED]
        return list(dict.fromkeys([*self.queue, *self.placed, *self.ready, *running, *late]))

    def _owner(self, request: Request, need: int) -> int | None:
        if request.pinned is None:
            return choose_owner(self.loads, need)
        return request.pinned if self.loads[request.pinned].free >= need else None

    def _need(self, request: Request) -> int:
        return pages_for(request.tokens_reserved, self.limits.page_size)

    def _row(self, step: int, slot: int) -> Request:
        try:
            return self._in_flight[step][slot]
        except KeyError:
            raise ProtocolError(f"a token came for slot {slot} of step {step}, not asked") from None

    def _append(self, request: Request, token: int) -> FinishReason.ValueType | None:
        request.generated.append(token)
        params = request.params
        stops = token in params.stop_token_ids
        if stops or (token in self.limits.eos_ids and not params.ignore_eos):
            finish = FinishReason.FINISH_REASON_STOP
        elif len(request.generated) >= params.max_tokens:
            finish = FinishReason.FINISH_REASON_LENGTH
        else:
            return None
        request.stage = Stage.ENDED
        return finish


def _admit(request: Request) -> Admit:
    history = request.params.needs_history
    return Admit(
        slot=request.slot,
        key=request.key,
        owner=request.owner,
        position=len(request.prompt) + len(request.generated) - 1,
        token=request.generated[-1],
        sampling=request.params,
        prompt=tuple(request.prompt) if history else (),
        generated=tuple(request.generated) if history else (),
        generated_count=len(request.generated),
    )
