"""Transfers into the pages of one node, from Begin until nothing of them can land any more.

    Begin --> Complete                    live
        \\---> Abort                       reserved: the writer says that nothing is in flight
        \\---> Release, end of a lease     quarantined, until
                    KV by gRPC              the windows of all TP ranks are closed
                    one-sided (NIXL)        the writer says Abort or Complete, or is dead

TP rank 0 keeps the books and tells the other ranks to open and close their windows. A rank that
doesn't answer leaves pages in quarantine; `reap` tries again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from grpc import aio

from tknp.attention_owner.writers import Writers
from tknp.errors import ProtocolError, TknpError
from tknp.kv.holding import Holding, Key
from tknp.kv.pages import PagePool
from tknp.rpc.convert import key_from, key_to
from tknp.rpc.status import error_from
from tknp.transfer.compatibility import check
from tknp.v1.attention_owner_pb2 import TransferRequest, TransferResponse
from tknp.worker.runtime import DecodeRuntime

if TYPE_CHECKING:
    from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerAsyncStub

    _Call = aio.UnaryUnaryMultiCallable[TransferRequest, TransferResponse]

log = logging.getLogger(__name__)
_SIBLING_S = 5.0


class Transfers:
    """Of one rank; the pages of the whole node at TP rank 0, whose `siblings` the others are."""

    def __init__(
        self,
        runtime: DecodeRuntime,
        siblings: Sequence[AttentionOwnerAsyncStub],
        clock: Callable[[], float],
        writers: Writers | None = None,
    ) -> None:
        self._runtime = runtime
        self._siblings = siblings
        self._clock = clock
        self._writers = writers or Writers()
        self._closed: set[tuple[Key, str]] = set()  # quarantined, and no window is open

    async def begin(self, request: TransferRequest, books: PagePool | None) -> bool:
        """Open windows; whether the writer can write this node by itself.

        `books`: at TP rank 0; the other ranks take the pages that it has put into `request`.
        Raises ProtocolError for a writer that doesn't fit, before anything has changed.
        """
        key, writer, runtime = key_from(request.key), request.writer, self._runtime
        if books is not None:
            check(runtime.pool.compatibility, request.compatibility)
            await self._writers.learn(writer, request.writer_addresses)
            books.begin(key, writer)
            request.pages[:] = books.holding(key).pages
        runtime.windows.open(key, writer, request.pages)
        answers = await self._tell([s.Begin for s in self._siblings], request)
        mine = runtime.receiver is not None and runtime.receiver.kind == "nixl"
        one_sided = request.one_sided and (mine or any(a.one_sided for a in answers))
        if books is not None:
            self._writers.note(writer, one_sided=one_sided)
        return one_sided

    async def complete(self, request: TransferRequest, books: PagePool | None) -> None:
        """Close windows; the pages are live. ProtocolError if the request has ended meanwhile."""
        key = key_from(request.key)
        self._runtime.windows.close(key, request.writer)
        await self._tell([s.Complete for s in self._siblings], request)
        if books is not None and not books.complete(key, request.writer):
            raise ProtocolError(f"transfer of {key}: the request has ended meanwhile")

    async def abort(self, request: TransferRequest, books: PagePool | None) -> None:
        """Close windows; nothing of the writer is in flight to these pages."""
        key = key_from(request.key)
        self._runtime.windows.close(key, request.writer)
        await self._tell([s.Abort for s in self._siblings], request)
        if books is not None:
            books.abort(key, request.writer)

    async def release(self, key: Key, books: PagePool) -> None:
        """The request is done with its pages; free unless a writer may still write them.

        Raises ProtocolError for one in the running batch, whose pages steps are writing.
        """
        if any(holding.key == key and holding.admitted for holding in books.holdings()):
            raise ProtocolError(f"{key} is in the running batch: a step has to end it first")
        books.release(key)
        for holding in books.quarantined():
            if holding.key == key:
                await self._close(holding, books)

    async def reap(self, books: PagePool) -> None:
        """End leases, and free what is in quarantine without need. Called whether idle or not."""
        for key in books.expire(self._clock()):
            log.warning("lease of %s ended before it was admitted", key)
        quarantined = books.quarantined()
        self._closed &= {(h.key, h.writer or "") for h in quarantined}
        for holding in quarantined:
            await self._close(holding, books)
        suspects = {holding.writer for holding in books.quarantined() if holding.writer}
        for writer in await self._writers.dead(suspects):
            keys = books.writer_gone(writer)
            log.warning(
                "writer %s is dead: pages of %s are free", writer, ", ".join(map(str, keys))
            )
        held = (*books.holdings(), *books.quarantined())
        self._writers.forget({holding.writer for holding in held if holding.writer})

    async def _close(self, holding: Holding, books: PagePool) -> None:
        """Refuse what still comes by gRPC; if that is all there can be, the pages are free."""
        key, writer = holding.key, holding.writer or ""
        if (key, writer) in self._closed:
            return
        self._runtime.windows.close(key, writer)
        message = TransferRequest(key=key_to(key), writer=writer)
        try:
            await self._tell([s.Abort for s in self._siblings], message)
        except TknpError as error:
            log.warning("pages of %s stay quarantined: %s", key, error)
            return
        if self._writers.one_sided(writer):
            self._closed.add((key, writer))
        else:
            books.abort(key, writer)

    async def _tell(
        self, calls: Sequence[_Call], request: TransferRequest
    ) -> list[TransferResponse]:
        try:
            return list(
                await asyncio.gather(*(call(request, timeout=_SIBLING_S) for call in calls))
            )
        except aio.AioRpcError as error:
            node = self._runtime.rank.node
            raise error_from(error, f"a TP rank of node {node}") from error
