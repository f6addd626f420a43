"""KV by one-sided writes: the prefill rank puts it straight into the owner's pool.

    owner     registers its whole pool once; publishes agent metadata and the pool's address in
              its OwnerDescription
    prefill   Describe, once an owner address and epoch -> remote agent, shape of its pool
              push: runs of memory -> one NIXL write a (layer, chunk, owner rank) -> polled

The owner takes no part in a write and can't refuse one, so it must keep a page that a writer may
still write out of use (quarantine). Nothing is copied on this side, which is why the local pages
must stay as they are until the push has ended.

Failures: an owner process that is gone, or an unreachable one, fails the write; it is described
anew at the next push. A frozen owner whose memory can't be written without its help leaves writes
running: `finish` and `abort` raise DeadlineExceeded, as NIXL can't cancel.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from functools import partial

from grpc import aio

from tknp.errors import ProtocolError, Unavailable
from tknp.kv.storage import KvStorage
from tknp.rpc.status import error_from
from tknp.transfer import compatibility
from tknp.transfer.base import Link
from tknp.transfer.grpc_stream import GrpcPath
from tknp.transfer.nixl_agent import NixlAgent
from tknp.transfer.nixl_link import NixlLink
from tknp.transfer.nixl_remote import Remote, check_route, described_shape, shape_of
from tknp.transfer.nixl_worker import NixlWorker
from tknp.transfer.plan import Route
from tknp.v1.attention_owner_pb2 import OwnerDescription
from tknp.v1.common_pb2 import Compatibility, DescribeRequest, RequestKey

_HEADER = struct.Struct("<II")  # segment and device of the pool, before NIXL's own metadata


class NixlPool:
    """An owner rank's pool, registered so that peers can write it."""

    def __init__(self, storage: KvStorage) -> None:
        self._agent = NixlAgent(storage)
        header = _HEADER.pack(int(self._agent.segment), self._agent.device)
        self.metadata = header + self._agent.metadata

    def close(self) -> None:
        self._agent.close()


class NixlPath:
    """Writes KV out of `storage`. `mine` is what an owner's description must agree with.

    `grpc`: carries Describe, and KV for owners without NIXL if `fall_back`; it is closed with this.
    """

    def __init__(
        self,
        storage: KvStorage,
        mine: Compatibility,
        timeout_s: float,
        grpc: GrpcPath,
        fall_back: bool,
    ) -> None:
        self._storage = storage
        self._mine = mine
        self._timeout_s = timeout_s
        self._grpc = grpc
        self._fall_back = fall_back
        self._agent = NixlAgent(storage)
        self._worker = NixlWorker(self._agent)
        self._shape = shape_of(storage)
        self._remotes: dict[str, tuple[int, Remote | None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def link(
        self,
        key: RequestKey,
        epoch: int,
        writer: str,
        route: Route,
        owner: str,
        pages: Sequence[int],
    ) -> Link:
        async with self._locks.setdefault(owner, asyncio.Lock()):
            remote = await self._remote(owner, epoch, route)
        if remote is None:
            return await self._grpc.link(key, epoch, writer, route, owner, pages)
        check_route(route, owner, remote)
        return NixlLink(
            self._worker, self._agent, remote, f"{route} at {owner}", route, self._storage,
            self._shape, tuple(pages), self._timeout_s,
        )  # fmt: skip

    async def close(self) -> None:
        try:
            ended = await asyncio.to_thread(self._worker.close, self._timeout_s)
            if not ended:
                raise Unavailable(
                    f"NIXL writes are still running after {self._timeout_s} s; the process must "
                    "end before their pages can be used again"
                )
            self._agent.close()
        finally:
            await self._grpc.close()

    async def _remote(self, owner: str, epoch: int, route: Route) -> Remote | None:
        """The pool of `owner`; None where KV has to go by gRPC."""
        known_epoch, known = self._remotes.get(owner, (None, None))
        if known_epoch == epoch and not (known and known.lost):
            return known
        described = await self._describe(owner)
        if not described.nixl_metadata:
            if not self._fall_back:
                raise ProtocolError(
                    f"{owner} takes no NIXL writes; install the extra tknp[nixl] there or set "
                    "kv_transfer to auto or grpc"
                )
            self._remotes[owner] = (epoch, None)
            return None
        if known is None or known.lost or known.metadata != described.nixl_metadata:
            if known is not None:
                await self._forget(owner, known)
            known = await self._learn(owner, route, described)
        self._remotes[owner] = (epoch, known)
        return known

    async def _describe(self, owner: str) -> OwnerDescription:
        try:
            described = await self._grpc.stub(owner).Describe(
                DescribeRequest(), timeout=self._timeout_s
            )
        except aio.AioRpcError as error:
            raise error_from(error, owner) from error
        try:
            compatibility.check(self._mine, described.compatibility)
        except ProtocolError as error:
            raise ProtocolError(f"{owner}: {error}") from error
        return described

    async def _learn(self, owner: str, route: Route, described: OwnerDescription) -> Remote:
        shape = described_shape(owner, self._shape, described)
        add = partial(self._agent.add, described.nixl_metadata[_HEADER.size :])
        try:
            segment, device = _HEADER.unpack_from(described.nixl_metadata)
            name = await asyncio.wrap_future(self._worker.call(add))
        except Exception as error:
            raise Unavailable(f"{route} at {owner}: NIXL refuses its metadata: {error}") from error
        return Remote(
            metadata=described.nixl_metadata,
            name=name,
            segment=segment,
            device=device,
            address=described.nixl_address,
            shape=shape,
            heads=range(described.head_start, described.head_stop),
        )

    async def _forget(self, owner: str, remote: Remote) -> None:
        def remove() -> bool:
            if remote.running:
                return False
            self._agent.remove(remote.name)
            return True

        try:
            removed = await asyncio.wrap_future(self._worker.call(remove))
        except Exception as error:
            raise Unavailable(f"{owner}: NIXL can't disconnect: {error}; retry") from error
        if not removed:
            raise Unavailable(f"{owner} was lost and writes to it have not ended yet; retry")
        self._remotes.pop(owner, None)
