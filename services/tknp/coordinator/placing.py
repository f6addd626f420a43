"""Gives waiting requests owners, has their prompts computed, and takes the first tokens.

    place -> Reserve at all owners -> Prefill.Run at a replica -> first token -> the driver
               | no room                | replica lost, or the request has ended
               +------------------------+--> Release -> wait for another attempt, or over

One task an attempt. Run is cancelled when its request ends, and the replica then tells the owners
that it writes no more. A lost replica costs its requests another attempt elsewhere, under another
key, and never at the same replica: the request may be the cause. An attempt after the first tokens
computes these too, behind the prompt: the draw depends on seed and position alone, so the client
sees one stream of tokens.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

import grpc
from grpc import aio

from tknp.coordinator.growth import Growth
from tknp.coordinator.owners import Owners, Part
from tknp.coordinator.replicas import Replicas
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.scheduler import Scheduler
from tknp.coordinator.startup import Peers
from tknp.errors import TknpError, Unavailable
from tknp.kv.holding import Key
from tknp.pool import Pool
from tknp.rpc.convert import key_to, sampling_to
from tknp.rpc.ids import pack_ids
from tknp.rpc.status import error_from
from tknp.rpc.tracing import TRACE
from tknp.v1.common_pb2 import Placement, Token
from tknp.v1.decode_root_pb2 import PrepareRequest
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.prefill_pb2 import PrefillRequest, PrefillResponse
from tknp.v1.prefill_pb2_grpc import PrefillStub

log = logging.getLogger(__name__)
_PREPARE_S = 30.0
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


class Placer:
    """`first_token` and `failed` take what becomes of a request, `grown` is called when a growth
    has been answered; all on the event loop.
    """

    def __init__(
        self,
        pool: Pool,
        peers: Peers,
        scheduler: Scheduler,
        clock: Callable[[], float],
        *,
        first_token: Callable[[Request, Token], None],
        failed: Callable[[Request, TknpError], None],
        grown: Callable[[], None],
    ) -> None:
        self.replicas = Replicas(peers.prefill)
        self._config = pool.config
        self._layout = pool.layout
        self._peers = peers
        self._scheduler = scheduler
        self._clock = clock
        self._first_token = first_token
        self._failed = failed
        self._grown = grown
        self._owners = Owners(pool, peers, self._withhold)
        self._room = asyncio.Event()
        self._calls: dict[Request, aio.UnaryUnaryCall[PrefillRequest, PrefillResponse]] = {}
        self._lost_at: dict[Request, dict[int, str]] = {}
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
        if self._scheduler.waiting:  # else every step would wake `run` for nothing
            self._room.set()

    def ended(self, request: Request, stage: Stage) -> None:
        """`request` has ended in `stage`: its owner gets the pages back."""
        self._lost_at.pop(request, None)
        if stage is Stage.READY:
            self._spawn(self._give_back(request, request.key, request.owners))
        elif request in self._calls:
            self._calls[request].cancel()  # its attempt gives the pages back
        self.room()

    def grow(self, growth: Growth) -> None:
        """Ask owners for what a running request needs."""
        self._spawn(self._grow(growth))

    def close(self) -> None:
        self._owners.close()
        for task in self._tasks:
            task.cancel()

    async def _grow(self, growth: Growth) -> None:
        given = await self._owners.grow(growth)
        if not self._scheduler.grew(growth, given):
            if growth.further is not None:
                await self._owners.release(growth.key, (growth.further,))
            self._scheduler.shrunk(growth)
        self._grown()

    async def _attempt(self, request: Request) -> None:
        TRACE.set(request.trace)  # of this task, and of the calls that it makes
        key, owners = request.key, request.owners
        try:
            placements = await self._owners.reserve(key, self._parts(request))
            if placements and not request.ended:
                prefill = self._prefill(request, placements)
                if request.params.json_schema:
                    token, _ = await asyncio.gather(prefill, self._prepare(request))
                else:
                    token = await prefill
                if token is not None and not request.ended:
                    self._first_token(request, token)
        except TknpError as error:
            self._failed(request, error)
        except Exception as error:
            log.exception("placing %s", key)
            self._failed(request, TknpError(f"placing failed: {error}"))
        if request.ended or request.stage is Stage.PLACED:
            await self._give_back(request, key, owners)
        else:
            self._lost_at.pop(request, None)

    def _parts(self, request: Request) -> list[Part]:
        parts = []
        needs = zip(request.owners, self._scheduler.reserved_tokens(request), strict=True)
        for i, (node, tokens) in enumerate(needs):
            shares = request.shares
            span = shares.prompt_span(i) if i < len(shares.owners) else range(request.tokens)
            parts.append(Part(node, tokens, span or range(0)))
        return parts

    async def _prepare(self, request: Request) -> None:
        """The rank that samples `request` reads its schema while the prompt is computed.

        If that fails it is read at admission, and what is wrong with it is said there.
        """
        rank = self._peers.nodes[self._layout.sampler(request.stream)][0]
        message = PrepareRequest(json_schema=request.params.json_schema)
        try:
            await DecodeRootStub(rank.channel).Prepare(message, timeout=_PREPARE_S)
        except aio.AioRpcError as error:
            log.warning("%s has not read the schema of %s: %s", rank.name, request.key, error)

    async def _prefill(self, request: Request, placements: Sequence[Placement]) -> Token | None:
        """The first token; None if the replica was lost or the request has ended."""
        if self._config.synthetic_kv:
            return Token(token_id=request.prompt[-1])
        lost_at = self._lost_at.setdefault(request, {})
        replica = await self._take(request, lost_at)
        ranks = self.replicas.ranks[replica]
        nodes, tokens = self._peers.nodes, request.tokens
        message = PrefillRequest(
            key=key_to(request.key),
            epoch=self._config.epoch,
            token_ids=pack_ids([*request.prompt, *request.generated]),
            sampling=sampling_to(request.params),
            placements=placements,
            owners=[nodes[p.node][p.tp_rank].address for p in placements],
            generated=len(request.generated),
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
            self.replicas.give(replica, tokens)

    async def _take(self, request: Request, lost_at: Mapping[int, str]) -> int:
        try:
            return self.replicas.take(request.tokens, lost_at)
        except Unavailable:  # as far as is known: ask before giving up
            await asyncio.gather(*map(self._peers.ask_prefill, self._peers.prefill))
            return self.replicas.take(request.tokens, lost_at)

    async def _give_back(self, request: Request, key: Key, owners: Collection[int]) -> None:
        """Release at the owners; a request that has not ended then waits for another attempt."""
        await self._owners.release(key, owners)
        if request.stage is Stage.PLACED:
            self._scheduler.unplace(request)
        else:
            self._scheduler.freed(request)
        self.room()

    def _withhold(self, node: int, pages: int) -> None:
        self._scheduler.withhold(node, pages)
        self.room()

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
