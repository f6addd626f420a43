"""Gives waiting requests an owner, has their prompts computed, and takes the first tokens.

    place -> Reserve at the owner -> Prefill.Run at a replica -> first token -> the driver
               | no room               | replica lost, or the request has ended
               +-----------------------+--> Release -> wait for another attempt, or over

One task an attempt. Reserve and Release are short and never cut, so that what a node holds is
always known here. Run is cancelled when its request ends, and the replica then tells the owner that
it writes no more. Until it has, the pages are quarantined there: the owner is asked until they are
free, and the scheduler doesn't count on them meanwhile. A lost replica costs its requests another
attempt elsewhere, under another key, and never at the same replica: the request may be the cause.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence

import grpc
from grpc import aio

from tknp.coordinator.replicas import Replicas
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.scheduler import Scheduler
from tknp.coordinator.startup import Peers
from tknp.errors import CapacityError, TknpError, Unavailable
from tknp.kv.holding import Key
from tknp.pool import Pool
from tknp.rpc.convert import key_to, sampling_to
from tknp.rpc.ids import pack_ids
from tknp.rpc.status import error_from
from tknp.v1.attention_owner_pb2 import ReleaseRequest, ReserveRequest
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import Placement, Token
from tknp.v1.prefill_pb2 import PrefillRequest, PrefillResponse
from tknp.v1.prefill_pb2_grpc import PrefillStub

log = logging.getLogger(__name__)
_OWNER_CALL_S = 10.0
_NO_ROOM_PAUSE_S = 0.05
_QUARANTINE_POLL_S = (0.02, 1.0)  # at first, at most
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Placer:
    """`first_token` and `failed` take what becomes of a request; all on the event loop."""

    def __init__(
        self,
        pool: Pool,
        peers: Peers,
        scheduler: Scheduler,
        clock: Callable[[], float],
        *,
        first_token: Callable[[Request, Token], None],
        failed: Callable[[Request, TknpError], None],
    ) -> None:
        self.replicas = Replicas(peers.prefill)
        self._config = pool.config
        self._peers = peers
        self._scheduler = scheduler
        self._clock = clock
        self._first_token = first_token
        self._failed = failed
        self._room = asyncio.Event()
        self._calls: dict[Request, aio.UnaryUnaryCall[PrefillRequest, PrefillResponse]] = {}
        self._lost_at: dict[Request, dict[int, str]] = {}
        self._watched: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Place requests for as long as the pool lives."""
        while True:
            await self._room.wait()
            self._room.clear()
            for request in self._scheduler.place():
                request.placed_s = request.placed_s or self._clock()
                self._spawn(self._attempt(request))

    def room(self) -> None:
        """Something may fit now: a request came, or pages or a slot became free."""
        self._room.set()

    def ended(self, request: Request, stage: Stage) -> None:
        """`request` has ended in `stage`: its owner gets the pages back."""
        self._lost_at.pop(request, None)
        if stage is Stage.READY:
            self._spawn(self._give_back(request, request.key, request.owner))
        elif request in self._calls:
            self._calls[request].cancel()  # its attempt gives the pages back
        self.room()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _attempt(self, request: Request) -> None:
        key, owner = request.key, request.owner
        try:
            placements = await self._reserve(request)
            if placements and not request.ended:
                token = await self._prefill(request, placements)
                if token is not None and not request.ended:
                    self._first_token(request, token)
        except TknpError as error:
            self._failed(request, error)
        except Exception as error:
            log.exception("placing %s", key)
            self._failed(request, TknpError(f"placing failed: {error}"))
        if request.ended or request.stage is Stage.PLACED:
            await self._give_back(request, key, owner)
        else:
            self._lost_at.pop(request, None)

    async def _reserve(self, request: Request) -> Sequence[Placement]:
        """Pages at the owner; none if it has no room after all."""
        leader = self._peers.nodes[request.owner][0]
        message = ReserveRequest(
            key=key_to(request.key), epoch=self._config.epoch, tokens=request.tokens_reserved,
            lease_s=self._config.lease_s,
        )  # fmt: skip
        try:
            reserve = AttentionOwnerStub(leader.channel).Reserve
            return (await reserve(message, timeout=_OWNER_CALL_S)).placements
        except aio.AioRpcError as error:
            refusal = error_from(error, f"{leader.name} at {leader.address}")
            if not isinstance(refusal, CapacityError):
                raise refusal from error
            await asyncio.sleep(_NO_ROOM_PAUSE_S)
            return ()

    async def _prefill(self, request: Request, placements: Sequence[Placement]) -> Token | None:
        """The first token; None if the replica was lost or the request has ended."""
        lost_at = self._lost_at.setdefault(request, {})
        replica = await self._take(request, lost_at)
        ranks = self.replicas.ranks[replica]
        owners = self._peers.nodes[request.owner]
        message = PrefillRequest(
            key=key_to(request.key),
            epoch=self._config.epoch,
            token_ids=pack_ids(request.prompt),
            sampling=sampling_to(request.params),
            placements=placements,
            owners=[owners[p.tp_rank].address for p in placements],
        )
        call = PrefillStub(ranks[0].channel).Run(message)
        self._calls[request] = call
        try:
            return (await call).token
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not request.ended or (task is not None and task.cancelling()):
                raise
            return None
        except aio.AioRpcError as error:
            failure = error_from(error, f"{ranks[0].name} at {ranks[0].address}")
            if error.code() not in _GONE:
                raise failure from error
            log.warning("prefill of %s was lost and goes elsewhere: %s", request.key, failure)
            lost_at[replica] = str(failure)
            self.replicas.lost(replica, str(failure))
            self._spawn(self._peers.ask_prefill(ranks))
            return None
        finally:
            del self._calls[request]
            self.replicas.give(replica, len(request.prompt))

    async def _take(self, request: Request, lost_at: Mapping[int, str]) -> int:
        try:
            return self.replicas.take(len(request.prompt), lost_at)
        except Unavailable:  # as far as is known: ask before giving up
            await asyncio.gather(*map(self._peers.ask_prefill, self._peers.prefill))
            return self.replicas.take(len(request.prompt), lost_at)

    async def _give_back(self, request: Request, key: Key, owner: int) -> None:
        """Release at the owner; a request that has not ended then waits for another attempt."""
        leader = self._peers.nodes[owner][0]
        message = ReleaseRequest(key=key_to(key), epoch=self._config.epoch)
        try:
            release = AttentionOwnerStub(leader.channel).Release
            counts = await release(message, timeout=_OWNER_CALL_S)
        except aio.AioRpcError as error:
            log.warning("release of %s at %s: %s", key, leader.name, error.details())
        else:
            self._scheduler.withhold(owner, counts.quarantined)
            if counts.quarantined and owner not in self._watched:
                self._spawn(self._watch(owner))
        if request.stage is Stage.PLACED:
            self._scheduler.unplace(request)
        else:
            self._scheduler.freed(request)
        self.room()

    async def _watch(self, node: int) -> None:
        """Ask `node` until it has its quarantined pages back."""
        self._watched.add(node)
        delay_s, longest_s = _QUARANTINE_POLL_S
        quarantined = 1
        while quarantined:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, longest_s)
            quarantined = await self._peers.quarantined(node)
            self._scheduler.withhold(node, quarantined)
            self.room()
        self._watched.discard(node)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
