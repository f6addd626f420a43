"""What the coordinator asks of attention owners: pages, for one request at all its owners.

    Reserve    at every owner or at none        before prefill
    Extend     one page more                    while it runs
    Reserve    a page at a further owner        while it runs
    Release    everything                       once no step runs it any more

Calls are short and never cut, so that what a node holds is always known here. After a Release the
pages of a prefill that may still write are quarantined at the owner: it is asked until they are
free, and the scheduler doesn't count on them meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass

from grpc import aio

from tknp.coordinator.growth import Growth
from tknp.coordinator.startup import Peer, Peers
from tknp.errors import CapacityError
from tknp.kv.holding import Key
from tknp.pool import Pool
from tknp.rpc.convert import key_to
from tknp.rpc.status import error_from
from tknp.v1.attention_owner_pb2 import (
    ExtendRequest,
    ReleaseRequest,
    ReserveRequest,
    ReserveResponse,
)
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import Placement

log = logging.getLogger(__name__)
_CALL_S = 10.0
_NO_ROOM_PAUSE_S = 0.05
_QUARANTINE_POLL_S = (0.02, 1.0)  # at first, at most


@dataclass(frozen=True)
class Part:
    """What one owner keeps of a request: room for `tokens`, of the prompt those of `span`."""

    node: int
    tokens: int
    span: range


class Owners:
    """`withhold(node, pages)` is told of quarantined pages."""

    def __init__(self, pool: Pool, peers: Peers, withhold: Callable[[int, int], None]) -> None:
        self._config = pool.config
        self._page_size = pool.page_size
        self._peers = peers
        self._withhold = withhold
        self._watched: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def reserve(self, key: Key, parts: Sequence[Part]) -> list[Placement]:
        """Where the prompt goes; nothing if an owner has no room after all.

        The caller releases at every owner what has come of it. Raises TknpError where an owner
        can't be asked.
        """
        calls = [self._reserve(key, part, self._config.synthetic_kv) for part in parts]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        for error in errors:
            if not isinstance(error, CapacityError):
                raise error
        if errors:
            await asyncio.sleep(_NO_ROOM_PAUSE_S)
            return []
        placements = []
        for part, answer in zip(parts, answers, strict=True):
            if isinstance(answer, BaseException):
                continue
            for placement in answer.placements:
                placement.token_start, placement.token_stop = part.span.start, part.span.stop
                placements.append(placement)
        return placements

    async def grow(self, growth: Growth) -> Collection[int]:
        """The nodes of `growth` that have given their page."""
        calls = [self._grow(growth, node) for node in growth.nodes]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        given = [n for n, a in zip(growth.nodes, answers, strict=True) if not _failed(a)]
        for answer in filter(_failed, answers):
            log.warning("growth of %s: %s", growth.key, answer)
        if len(given) < len(growth.nodes):
            await asyncio.sleep(_NO_ROOM_PAUSE_S)
        return given

    async def release(self, key: Key, nodes: Collection[int]) -> None:
        """Give everything of `key` back at `nodes`. An owner that can't be asked is left alone."""
        await asyncio.gather(*(self._release(key, node) for node in nodes))

    async def _grow(self, growth: Growth, node: int) -> ReserveResponse:
        if node == growth.further:
            part = Part(node, self._page_size, range(0))
            return await self._reserve(growth.key, part, without_transfer=True)
        extend = ExtendRequest(
            key=key_to(growth.key), epoch=self._config.epoch, tokens=self._page_size
        )
        leader = self._peers.nodes[node][0]
        call = AttentionOwnerStub(leader.channel).Extend(extend, timeout=_CALL_S)
        return await _answer(leader, call)

    async def _reserve(self, key: Key, part: Part, without_transfer: bool) -> ReserveResponse:
        leader = self._peers.nodes[part.node][0]
        message = ReserveRequest(
            key=key_to(key), epoch=self._config.epoch, tokens=part.tokens,
            lease_s=self._config.lease_s, without_transfer=without_transfer,
        )  # fmt: skip
        return await _answer(
            leader, AttentionOwnerStub(leader.channel).Reserve(message, timeout=_CALL_S)
        )

    async def _release(self, key: Key, node: int) -> None:
        leader = self._peers.nodes[node][0]
        message = ReleaseRequest(key=key_to(key), epoch=self._config.epoch)
        try:
            counts = await AttentionOwnerStub(leader.channel).Release(message, timeout=_CALL_S)
        except aio.AioRpcError as error:
            log.warning("release of %s at %s: %s", key, leader.name, error.details())
            return
        self._withhold(node, counts.quarantined)
        if counts.quarantined and node not in self._watched:
            self._spawn(self._watch(node))

    async def _watch(self, node: int) -> None:
        """Ask `node` until it has its quarantined pages back."""
        self._watched.add(node)
        delay_s, longest_s = _QUARANTINE_POLL_S
        quarantined = 1
        while quarantined:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, longest_s)
            quarantined = await self._peers.quarantined(node)
            self._withhold(node, quarantined)
        self._watched.discard(node)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _answer(leader: Peer, call: Awaitable[ReserveResponse]) -> ReserveResponse:
    try:
        return await call
    except aio.AioRpcError as error:
        raise error_from(error, f"{leader.name} at {leader.address}") from error


def _failed(answer: object) -> bool:
    return isinstance(answer, BaseException)
