"""AttentionOwner on one rank.

TP rank 0 keeps the books of its node: one PagePool serves all its ranks, because page ids are the
same on each. The other ranks keep KV only; rank 0 opens and closes their write windows as transfers
begin and end, so that a late write finds no window on any rank.

    coordinator  Reserve ............................ Release (never admitted)
    prefill               Begin  Write...  Complete
    step                                              admit ... end

Leases are checked on every tick, idle or not. A lease that ends while a writer is active sends the
pages to quarantine, see `transfers.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from grpc import aio

from tknp.attention_owner.transfers import Transfers
from tknp.errors import ProtocolError, Unavailable
from tknp.kv.holding import State
from tknp.kv.pages import PagePool
from tknp.layout.rank import Rank
from tknp.rpc.checks import check_lease, check_writer
from tknp.rpc.convert import key_from
from tknp.transfer.receiver import write
from tknp.v1 import attention_owner_pb2 as pb
from tknp.v1 import attention_owner_pb2_grpc
from tknp.v1.common_pb2 import DescribeRequest, Placement
from tknp.v1.step_pb2 import Step, StepResult
from tknp.worker.runtime import DecodeRuntime
from tknp.worker.steps import StepServer

log = logging.getLogger(__name__)
_TICK_S = 1.0


class OwnerService(attention_owner_pb2_grpc.AttentionOwnerServicer):
    """`siblings`: channels to the other TP ranks, on TP rank 0 only."""

    def __init__(
        self,
        runtime: DecodeRuntime,
        steps: StepServer,
        siblings: Sequence[aio.Channel],
        clock: Callable[[], float],
    ) -> None:
        self._runtime = runtime
        self._steps = steps
        stubs = [attention_owner_pb2_grpc.AttentionOwnerStub(c) for c in siblings]
        self._transfers = Transfers(runtime, stubs, clock)

    async def tick(self) -> None:
        """End leases for as long as the process lives, idle or not."""
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.reap()
            except Exception:
                log.exception("leases are not being watched")

    async def reap(self) -> None:
        """End leases and quarantines that are over."""
        if self._runtime.books is not None:
            await self._transfers.reap(self._runtime.books)

    async def Describe(self, request: DescribeRequest, context: Any) -> pb.OwnerDescription:
        runtime = self._runtime
        storage, receiver = runtime.storage, runtime.receiver
        heads = runtime.pool.layout.kv_heads(runtime.rank)
        return pb.OwnerDescription(
            compatibility=runtime.pool.compatibility,
            progress=runtime.life.progress,
            epoch=runtime.pool.config.epoch,
            node=runtime.rank.node,
            tp_rank=runtime.rank.t,
            head_start=heads.start,
            head_stop=heads.stop,
            pages=runtime.pages,
            kv_bytes=storage.nbytes if storage is not None else 0,
            weight_bytes=runtime.life.total_bytes,
            nixl_metadata=receiver.nixl_metadata if receiver is not None else b"",
            nixl_address=receiver.nixl_address if receiver is not None else 0,
            counts=self._counts(),
            step_s=runtime.step_s,
        )

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.ReserveResponse:
        pool = self._books(request.epoch)
        key = key_from(request.key)
        pages = pool.reserve(key, request.tokens, check_lease(request.lease_s))
        if request.without_transfer:
            pool.settle(key)
        return pb.ReserveResponse(placements=self._placements(pages, 0, request.tokens))

    async def Extend(self, request: pb.ExtendRequest, context: Any) -> pb.ReserveResponse:
        pool = self._books(request.epoch)
        key = key_from(request.key)
        pages = pool.extend(key, request.tokens)
        span = pool.holding(key).span
        start = span.token_stop - request.tokens
        return pb.ReserveResponse(placements=self._placements(pages, start, span.token_stop))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.PageCounts:
        await self._transfers.release(key_from(request.key), self._books(request.epoch))
        return self._counts()

    async def Begin(self, request: pb.TransferRequest, context: Any) -> pb.TransferResponse:
        check_writer(request.writer, request.writer_addresses)
        one_sided = await self._transfers.begin(request, self._own_books(request.epoch))
        return pb.TransferResponse(one_sided=one_sided)

    async def Renew(self, request: pb.TransferRequest, context: Any) -> pb.TransferResponse:
        self._books(request.epoch).renew(key_from(request.key))
        return pb.TransferResponse()

    async def Complete(self, request: pb.TransferRequest, context: Any) -> pb.TransferResponse:
        await self._transfers.complete(request, self._own_books(request.epoch))
        return pb.TransferResponse()

    async def Abort(self, request: pb.TransferRequest, context: Any) -> pb.TransferResponse:
        await self._transfers.abort(request, self._runtime.books)
        return pb.TransferResponse()

    async def Write(self, chunks: AsyncIterator[pb.KvChunk], context: Any) -> pb.WriteResponse:
        if self._runtime.receiver is None:
            raise Unavailable(f"rank {self._runtime.rank} has no KV pages (yet)")
        return await write(self._runtime.receiver, chunks)

    async def Run(self, steps: AsyncIterator[Step], context: Any) -> AsyncIterator[StepResult]:
        async for result in self._steps.run(steps):
            yield result

    def _books(self, epoch: int) -> PagePool:
        self._check_epoch(epoch)
        if not self._keeps_books:
            raise ProtocolError(f"rank {self._runtime.rank} keeps no books: ask TP rank 0")
        if self._runtime.books is None:
            raise Unavailable(f"node {self._runtime.rank.node} is still loading")
        return self._runtime.books

    def _own_books(self, epoch: int) -> PagePool | None:
        """The node's books at TP rank 0, None at the other ranks, which have none."""
        self._check_epoch(epoch)
        return self._books(epoch) if self._keeps_books else None

    @property
    def _keeps_books(self) -> bool:
        return self._runtime.rank.t == 0

    def _check_epoch(self, epoch: int) -> None:
        mine = self._runtime.pool.config.epoch
        if epoch != mine:
            raise ProtocolError(f"epoch {epoch} is not this node's {mine}: the pool has changed")

    def _placements(self, pages: Sequence[int], start: int, stop: int) -> list[Placement]:
        layout, node = self._runtime.pool.layout, self._runtime.rank.node
        layers = layout.kv_layers(self._runtime.rank)
        placements = []
        for t in range(layout.tp):
            heads = layout.kv_heads(Rank(node, t))
            placements.append(
                Placement(
                    node=node,
                    tp_rank=t,
                    layer_start=layers.start,
                    layer_stop=layers.stop,
                    head_start=heads.start,
                    head_stop=heads.stop,
                    token_start=start,
                    token_stop=stop,
                    pages=pages,
                )
            )
        return placements

    def _counts(self) -> pb.PageCounts:
        if self._runtime.books is None:
            return pb.PageCounts()
        counts = self._runtime.books.counts()
        return pb.PageCounts(
            free=counts[State.FREE],
            reserved=counts[State.RESERVED],
            receiving=counts[State.RECEIVING],
            live=counts[State.LIVE],
            quarantined=counts[State.QUARANTINED],
        )
