"""Carries out what the scheduler decides.

Two loops on the event loop share the scheduler, so nothing is locked:

    placing   queue -> Reserve at the owner -> Prefill.Run -> first token -> ready
    stepping  delta -> every node, at most two steps in flight; tokens -> requests' events

A stream that breaks ends the pool: every open request gets the error, later ones are refused. A
prefill that fails ends its request alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial

from grpc import aio

from tknp.coordinator.request import Event, Request, Stage
from tknp.coordinator.scheduler import Limits, Scheduler
from tknp.coordinator.startup import Peers
from tknp.coordinator.steps import StepStreams
from tknp.errors import CapacityError, ProtocolError, TknpError, Unavailable
from tknp.kv.holding import Key
from tknp.pool import Pool
from tknp.rpc.convert import key_to, sampling_to
from tknp.rpc.ids import pack_ids
from tknp.rpc.status import error_from
from tknp.sampling.params import SamplingParams
from tknp.v1.attention_owner_pb2 import ReleaseRequest, ReserveRequest
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import FinishReason, Phase, Token
from tknp.v1.prefill_pb2 import PrefillRequest
from tknp.v1.prefill_pb2_grpc import PrefillStub
from tknp.v1.step_pb2 import StepResult

log = logging.getLogger(__name__)
_STEPS_IN_FLIGHT = 2
_RESERVE_S = 10.0
_RETRY_S = 0.05
_WARM_UP_TOKENS = 3


class Driver:
    """One pool. `start` returns at once; `phase` and `error` tell how far it is."""

    def __init__(self, pool: Pool, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.peers = Peers(pool)
        self.phase: Phase.ValueType = Phase.PHASE_LOADING
        self.error = ""
        self.scheduler: Scheduler | None = None
        self.counts = {"completed": 0, "cancelled": 0, "refused": 0, "failed": 0}
        self.ready = asyncio.Event()
        self.failed = asyncio.Event()
        self.prefilling = [0] * len(self.peers.prefill)
        self.clock = clock
        self._streams: StepStreams | None = None
        self._work = asyncio.Event()
        self._room = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._placements: dict[Request, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._spawn(self._prepare())

    async def stop(self) -> None:
        self.fail("the coordinator is shutting down")
        for task in self._tasks:
            task.cancel()
        if self._streams is not None:
            self._streams.close()
        await self.peers.close()

    def submit(self, request: Request) -> None:
        """Queue a checked request. Raises Unavailable or CapacityError."""
        self.serving().submit(request)
        self._room.set()

    def serving(self) -> Scheduler:
        """The scheduler of a pool that serves; raises Unavailable saying why it doesn't."""
        if self.scheduler is None or self.phase != Phase.PHASE_READY:
            why = self.error or Phase.Name(self.phase).removeprefix("PHASE_").lower()
            raise Unavailable(f"the pool is not ready: {why}")
        return self.scheduler

    def cancel(self, request: Request) -> None:
        """The client is gone. Harmless if the request has ended."""
        if request.stage is not Stage.ENDED:
            self.counts["cancelled"] += 1
            self._end(request)

    def fail(self, reason: str) -> None:
        """The pool can't go on: end every open request with `reason`."""
        if self.failed.is_set():
            return
        log.error("pool failed: %s", reason)
        self.phase, self.error = Phase.PHASE_FAILED, reason
        self.failed.set()
        for request in self.scheduler.live() if self.scheduler is not None else ():
            self._fail_request(request, Unavailable(reason))

    async def _prepare(self) -> None:
        try:
            await self.peers.ready()
            self.phase = Phase.PHASE_WARMING
            config, model = self.pool.config, self.pool.checkpoint.config
            prompts = [p.prefill.max_prompt_tokens for r in self.peers.prefill for p in r
                       if p.prefill is not None]  # fmt: skip
            limits = Limits(
                self.pool.page_size, config.max_batch, config.max_queue,
                self.pool.max_model_len, min(prompts), frozenset(model.eos_ids),
            )  # fmt: skip
            self.scheduler = Scheduler(self.peers.pages(), limits, config.epoch)
            leaders = [ranks[0] for ranks in self.peers.nodes]
            self._streams = StepStreams(
                self.pool, leaders, self._sampled, self._finished, self.fail
            )
            self._spawn(self._place())
            self._spawn(self._step())
            await self._warm_up()
        except TknpError as error:
            self.fail(str(error))
            return
        if not self.failed.is_set():
            self.phase = Phase.PHASE_READY
            self.ready.set()

    async def _warm_up(self) -> None:
        """One short request at every owner: prefill, transfer and steps work, and are warm."""
        scheduler = self.scheduler
        if scheduler is None:
            raise ProtocolError("warm-up without a scheduler")
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        requests = [
            Request(Key(f"warm-up-{n}", 0), (0,), params, self.clock(), pinned=n)
            for n in self.pool.layout.owners
        ]
        for request in requests:
            scheduler.check(len(request.prompt), params.max_tokens)
            scheduler.submit(request)
        self._room.set()
        for request in requests:
            event = Event()
            while event.finish is None:
                event = await request.events.get()
                if event.error is not None:
                    raise event.error
        self.counts["completed"] -= len(requests)

    async def _place(self) -> None:
        while True:
            await self._room.wait()
            self._room.clear()
            for request in self.scheduler.place() if self.scheduler is not None else ():
                request.placed_s = request.placed_s or self.clock()
                task = asyncio.create_task(self._prefill(request))
                self._placements[request] = task
                task.add_done_callback(partial(self._placed, request))

    def _placed(self, request: Request, task: asyncio.Task[None]) -> None:
        self._placements.pop(request, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("placing %s", request.key, exc_info=task.exception())
            self._fail_request(request, TknpError(f"placing failed: {task.exception()}"))

    async def _prefill(self, request: Request) -> None:
        """Reserve at the owner, have the prompt computed there, take the first token."""
        owner = self.peers.nodes[request.owner]
        stub = AttentionOwnerStub(owner[0].channel)
        try:
            reserved = await stub.Reserve(
                ReserveRequest(
                    key=key_to(request.key), epoch=self.pool.config.epoch,
                    tokens=request.tokens_reserved, lease_s=self.pool.config.lease_s,
                ),
                timeout=_RESERVE_S,
            )  # fmt: skip
        except aio.AioRpcError as error:
            refusal = error_from(error, f"{owner[0].name} at {owner[0].address}")
            if isinstance(refusal, CapacityError) and request.stage is Stage.PLACED:
                self._scheduler.unplace(request)
                asyncio.get_running_loop().call_later(_RETRY_S, self._room.set)
            else:
                self._fail_request(request, refusal)
            return
        replica = min(range(len(self.prefilling)), key=lambda p: self.prefilling[p])
        self.prefilling[replica] += 1
        peer = self.peers.prefill[replica][0]
        try:
            message = PrefillRequest(
                key=key_to(request.key),
                epoch=self.pool.config.epoch,
                token_ids=pack_ids(request.prompt),
                sampling=sampling_to(request.params),
                placements=reserved.placements,
                owners=[owner[p.tp_rank].address for p in reserved.placements],
            )
            response = await PrefillStub(peer.channel).Run(message)
        except aio.AioRpcError as error:
            self._fail_request(request, error_from(error, f"{peer.name} at {peer.address}"))
            return
        finally:
            self.prefilling[replica] -= 1
        if request.stage is not Stage.ENDED:
            self._first_token(request, response.token)

    def _first_token(self, request: Request, token: Token) -> None:
        if token.error:
            self._fail_request(request, TknpError(token.error))
            return
        request.first_token_s = self.clock()
        finish = self._scheduler.first_token(request, token.token_id)
        self._emit(request, token, finish)
        if finish is not None:
            self._release(request)
        self._work.set()

    async def _step(self) -> None:
        """Launch steps while there is anything to run, two in flight at most."""
        while True:
            scheduler, streams = self._scheduler, self._streams
            if streams is not None and scheduler.in_flight < _STEPS_IN_FLIGHT:
                delta = scheduler.delta()
                if delta is not None:
                    streams.send(delta)
                    continue
            self._work.clear()
            await self._work.wait()

    def _sampled(self, result: StepResult) -> None:
        scheduler = self._scheduler
        for slot, token in zip(result.slots, result.tokens, strict=True):
            if token.error:
                failed = scheduler.row_failed(result.step, slot)
                if failed is not None:
                    self.counts["failed"] += 1
                    failed.events.put_nowait(Event(error=TknpError(token.error)))
                continue
            taken = scheduler.token(result.step, slot, token.token_id)
            if taken is not None:
                self._emit(taken[0], token, taken[1])
        scheduler.sampled(result.step)
        self._work.set()

    def _finished(self, step: int) -> None:
        self._scheduler.finished(step)
        self._room.set()

    def _emit(self, request: Request, token: Token, finish: FinishReason.ValueType | None) -> None:
        if finish is not None:
            self.counts["completed"] += 1
        request.events.put_nowait(Event((token,), finish))

    def _fail_request(self, request: Request, error: TknpError) -> None:
        if request.stage is Stage.ENDED:
            return
        self.counts["failed"] += 1
        log.warning("request %s failed: %s", request.key, error)
        request.events.put_nowait(Event(error=error))
        self._end(request)

    def _end(self, request: Request) -> None:
        placed = self._placements.get(request)
        if self._scheduler.end(request):
            if placed is not None and placed is not asyncio.current_task():
                placed.cancel()
            self._release(request)
        self._work.set()
        self._room.set()

    def _release(self, request: Request) -> None:
        """Give back the pages of a request that no step has admitted."""
        self._spawn(self._release_at_owner(request))

    async def _release_at_owner(self, request: Request) -> None:
        owner = self.peers.nodes[request.owner][0]
        message = ReleaseRequest(key=key_to(request.key), epoch=self.pool.config.epoch)
        try:
            await AttentionOwnerStub(owner.channel).Release(message, timeout=_RESERVE_S)
        except aio.AioRpcError as error:
            log.warning("release of %s at %s: %s", request.key, owner.name, error.details())
        self._scheduler.freed(request)
        self._room.set()

    @property
    def _scheduler(self) -> Scheduler:
        if self.scheduler is None:
            raise ProtocolError("the pool has not been described yet")
        return self.scheduler

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
