"""Requests under way on one rank of a replica: their local pages and their push."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from tknp.errors import ProtocolError
from tknp.kv.holding import Key
from tknp.kv.pages import PagePool
from tknp.prefill.compute import Chunk, Drawn, PrefillRank
from tknp.rpc.convert import key_to
from tknp.sampling.history import RowState
from tknp.transfer.base import Push, Sender
from tknp.v1.common_pb2 import Placement

_NO_LEASE_S = float("inf")


@dataclass(frozen=True)
class Target:
    """Where a request's KV goes: answer of Reserve, the address of each placement's rank."""

    epoch: int
    writer: str
    placements: Sequence[Placement]
    owners: Sequence[str]


class LocalRequests:
    """`scratch` keeps the books of `rank`'s pages; `sender` pushes them."""

    def __init__(self, rank: PrefillRank, scratch: PagePool, sender: Sender) -> None:
        self._rank = rank
        self._scratch = scratch
        self._sender = sender
        self._pushes: dict[Key, Push] = {}
        self._freed = asyncio.Condition()

    def __len__(self) -> int:
        return len(self._pushes)

    async def room(self, tokens: int) -> None:
        """Wait until `tokens` fit. The caller opens at once."""
        async with self._freed:
            await self._freed.wait_for(lambda: self._scratch.free_tokens >= tokens)

    async def open(self, key: Key, tokens: int, target: Target) -> None:
        """Take local pages for a prompt of `tokens` and begin its push."""
        pages = self._scratch.reserve(key, tokens, _NO_LEASE_S)
        try:
            self._pushes[key] = await self._sender.open(
                key_to(key), target.epoch, target.writer, target.placements, target.owners, pages
            )
        except BaseException:
            await self._forget(key)
            raise

    async def chunk(
        self, key: Key, ids: Sequence[int], start: int, row: RowState | None
    ) -> asyncio.Future[Drawn | None]:
        """Queue a chunk on the compute thread; the order of calls is the order of execution."""
        holding = self._scratch.holding(key)
        if not ids or start + len(ids) > holding.span.tokens:
            raise ProtocolError(
                f"a chunk of {len(ids)} tokens at {start} is not part of the prompt of {key}, "
                f"which has {holding.span.tokens}"
            )
        chunk = Chunk(ids, start, holding.pages, self._push(key), row)
        return asyncio.wrap_future(self._rank.submit(chunk))

    async def finish(self, key: Key) -> int:
        """Wait until the owners have everything; returns bytes sent by this rank."""
        sent = await self._push(key).finish()
        await self._forget(key)
        return sent

    async def abort(self, key: Key) -> None:
        """Nothing of `key` is in flight any more once this returns. Unknown keys are done."""
        push = self._pushes.get(key)
        if push is not None:
            await push.abort()
        await self._forget(key)

    async def close(self) -> None:
        """Abort whatever is under way. Raises TknpError if something stays in flight."""
        for key in list(self._pushes):
            await self.abort(key)

    async def _forget(self, key: Key) -> None:
        self._pushes.pop(key, None)
        async with self._freed:
            self._scratch.release(key)
            self._freed.notify_all()

    def _push(self, key: Key) -> Push:
        try:
            return self._pushes[key]
        except KeyError:
            raise ProtocolError(f"no prefill of {key} is under way here") from None
