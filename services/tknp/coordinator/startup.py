"""What the processes of a pool report, and whether they fit together.

Every process answers Describe from the moment its port is open, so a pool that can't start says
which part is missing and why.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import grpc
from grpc import aio

from tknp.errors import ProtocolError, Unavailable
from tknp.pool import Pool
from tknp.rpc.channel import connect
from tknp.transfer.compatibility import check
from tknp.v1.attention_owner_pb2 import OwnerDescription
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import Compatibility, DescribeRequest, Phase, Progress
from tknp.v1.decode_root_pb2 import RootDescription
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.prefill_pb2 import PrefillDescription
from tknp.v1.prefill_pb2_grpc import PrefillStub

log = logging.getLogger(__name__)
_POLL_S = 0.2
_DESCRIBE_S = 5.0


@dataclass
class Peer:
    """One process of the pool. A decode rank has `root` or `owner` or both; prefill its own."""

    name: str
    address: str
    channel: aio.Channel
    root: RootDescription | None = None
    owner: OwnerDescription | None = None
    prefill: PrefillDescription | None = None
    progress: Progress = field(default_factory=Progress)


class Peers:
    """Every process of `pool`: `nodes[n][t]` and `prefill[p][t]`."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.nodes = [
            [Peer(f"decode node {n}, rank {t}", a, connect(a)) for t, a in enumerate(c.addresses)]
            for n, c in enumerate(pool.config.nodes)
        ]
        self.prefill = [
            [Peer(f"prefill {p}, rank {t}", a, connect(a)) for t, a in enumerate(c.addresses)]
            for p, c in enumerate(pool.config.prefill)
        ]

    @property
    def all(self) -> list[Peer]:
        return [peer for group in (*self.nodes, *self.prefill) for peer in group]

    async def refresh(self) -> None:
        """Ask every process once. One that doesn't answer keeps what it last said."""
        asks = [self._ask_rank(n, peer) for n, ranks in enumerate(self.nodes) for peer in ranks]
        asks += [self._ask_prefill(peer) for ranks in self.prefill for peer in ranks]
        await asyncio.gather(*asks)

    async def ready(self) -> None:
        """Wait until all are READY and fit together.

        Raises Unavailable when one reports a failure, ProtocolError when one belongs elsewhere.
        """
        while True:
            await self.refresh()
            for peer in self.all:
                if peer.progress.phase == Phase.PHASE_FAILED:
                    raise Unavailable(f"{peer.name} at {peer.address}: {peer.progress.error}")
            if all(peer.progress.phase == Phase.PHASE_READY for peer in self.all):
                break
            await asyncio.sleep(_POLL_S)
        for peer in self.all:
            self._check(peer)

    def pages(self) -> list[int]:
        """Pages that each node can give to requests: those of its smallest rank, less the dummy."""
        return [
            min(max(p.owner.pages - 1, 0) if p.owner is not None else 0 for p in ranks)
            for ranks in self.nodes
        ]

    async def close(self) -> None:
        await asyncio.gather(*(peer.channel.close(None) for peer in self.all))

    async def _ask_rank(self, node: int, peer: Peer) -> None:
        role = self._pool.config.nodes[node].role
        try:
            if role != "attention-owner":
                root = DecodeRootStub(peer.channel)
                peer.root = await root.Describe(DescribeRequest(), timeout=_DESCRIBE_S)
                peer.progress = peer.root.progress
            if role != "decode-root":
                owner = AttentionOwnerStub(peer.channel)
                peer.owner = await owner.Describe(DescribeRequest(), timeout=_DESCRIBE_S)
                peer.progress = peer.owner.progress
        except aio.AioRpcError as error:
            _not_heard(peer, error)

    async def _ask_prefill(self, peer: Peer) -> None:
        try:
            stub = PrefillStub(peer.channel)
            peer.prefill = await stub.Describe(DescribeRequest(), timeout=_DESCRIBE_S)
            peer.progress = peer.prefill.progress
        except aio.AioRpcError as error:
            _not_heard(peer, error)

    def _check(self, peer: Peer) -> None:
        for description in (peer.root, peer.owner, peer.prefill):
            if description is None:
                continue
            theirs: Compatibility = description.compatibility
            try:
                check(self._pool.compatibility, theirs)
            except ProtocolError as error:
                raise ProtocolError(f"{peer.name} at {peer.address}: {error}") from None


def _not_heard(peer: Peer, error: aio.AioRpcError) -> None:
    if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        raise error
    log.debug("%s at %s: %s", peer.name, peer.address, error.details())
