"""What the processes of a pool report, and whether they fit together.

Every process answers Describe from the moment its port is open, so a pool that can't start says
which part is missing and why. Once it runs, the same question tells which processes still answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc import aio

from tknp.errors import ProtocolError, TknpError, Unavailable
from tknp.pool import Pool
from tknp.rpc.channel import connect
from tknp.rpc.security import Security
from tknp.transfer.compatibility import check
from tknp.v1.attention_owner_pb2 import OwnerDescription
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import DescribeRequest, Phase, Progress
from tknp.v1.decode_root_pb2 import RootDescription
from tknp.v1.decode_root_pb2_grpc import DecodeRootStub
from tknp.v1.prefill_pb2 import PrefillDescription
from tknp.v1.prefill_pb2_grpc import PrefillStub

log = logging.getLogger(__name__)
_POLL_S = 0.2
_DESCRIBE_S = 2.0
# A decode rank is warm after its first step, which needs the whole pool; prefill warms alone.
_WORKING = (Phase.PHASE_WARMING, Phase.PHASE_READY)
_ABSENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


@dataclass
class Peer:
    """One process of the pool. A decode rank has `root` or `owner` or both; prefill its own.

    `lost`: why it can't be reached, `misfit`: why it can't be used, as of its last answer.
    """

    name: str
    address: str
    channel: aio.Channel
    root: RootDescription | None = None
    owner: OwnerDescription | None = None
    prefill: PrefillDescription | None = None
    progress: Progress = field(default_factory=Progress)
    lost: str = ""
    misfit: str = ""

    @property
    def trouble(self) -> str:
        """Why nothing can be asked of it now; empty if it is well."""
        if self.lost or self.misfit:
            return self.lost or self.misfit
        warms_alone = self.prefill is not None and self.progress.phase == Phase.PHASE_WARMING
        if self.progress.phase in _WORKING and not warms_alone:
            return ""
        phase = Phase.Name(self.progress.phase).removeprefix("PHASE_").lower()
        return self.progress.error or f"not ready: {phase}"


class Peers:
    """Every process of `pool`: `nodes[n][t]` and `prefill[p][t]`."""

    def __init__(self, pool: Pool, security: Security) -> None:
        self._pool = pool

        def ranks(name: str, addresses: Sequence[str]) -> list[Peer]:
            return [
                Peer(f"{name}, rank {t}", address, connect(address, security))
                for t, address in enumerate(addresses)
            ]

        config = pool.config
        self.nodes = [ranks(f"decode node {n}", c.addresses) for n, c in enumerate(config.nodes)]
        self.prefill = [ranks(f"prefill {p}", c.addresses) for p, c in enumerate(config.prefill)]

    @property
    def all(self) -> list[Peer]:
        return [peer for group in (*self.nodes, *self.prefill) for peer in group]

    async def refresh(self) -> None:
        """Ask every process once. One that doesn't answer keeps what it last said."""
        decode = [self._ask_rank(n, peer) for n, ranks in enumerate(self.nodes) for peer in ranks]
        prefill = [self.ask_prefill(ranks) for ranks in self.prefill]
        await asyncio.gather(*decode, *prefill)

    async def ready(self, silent: Callable[[Iterable[Peer]], Iterable[Peer]]) -> None:
        """Wait until all decode ranks and a prefill replica are READY, and fit together.

        Prefill comes and goes, so one replica is enough and the others are taken into use when
        they come. `silent`: which processes have stopped answering, see `tknp.coordinator.silence`;
        asked after each round. Raises Unavailable when a decode rank reports a failure or is
        silent, ProtocolError when one belongs elsewhere; for prefill only once that is so of every
        replica, since one of which nothing was heard yet may still come.
        """
        while True:
            await self.refresh()
            silent(self.all)
            for peer in (peer for ranks in self.nodes for peer in ranks):
                if error := _defect(peer):
                    raise error
            defects = [next(filter(None, map(_defect, ranks)), None) for ranks in self.prefill]
            if defects and all(defects):
                kinds = {type(error) for error in defects if error is not None}
                kind = kinds.pop() if len(kinds) == 1 else Unavailable
                raise kind("; ".join(map(str, defects)))
            if self._complete():
                return
            await asyncio.sleep(_POLL_S)

    def _complete(self) -> bool:
        """Whether nothing is missing that the first step needs."""
        decode = all(not peer.trouble for ranks in self.nodes for peer in ranks)
        prefill = any(not any(peer.trouble for peer in ranks) for ranks in self.prefill)
        return decode and (prefill or not self.prefill)

    def pages(self) -> tuple[int, ...]:
        """Pages that each node can give to requests: those of its smallest rank, less the dummy."""
        return tuple(
            min(max(p.owner.pages - 1, 0) if p.owner is not None else 0 for p in ranks)
            for ranks in self.nodes
        )

    async def quarantined(self, node: int) -> int:
        """Pages of `node` that no request holds and that it can't give; asks it."""
        leader = self.nodes[node][0]
        await self._ask_rank(node, leader)
        return leader.owner.counts.quarantined if leader.owner is not None else 0

    async def ask_prefill(self, ranks: Sequence[Peer]) -> None:
        """Ask the processes of one prefill replica."""
        await asyncio.gather(*(self._ask_prefill_rank(peer) for peer in ranks))

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
        else:
            self._heard(peer, (peer.root, peer.owner))

    async def _ask_prefill_rank(self, peer: Peer) -> None:
        try:
            stub = PrefillStub(peer.channel)
            peer.prefill = await stub.Describe(DescribeRequest(), timeout=_DESCRIBE_S)
            peer.progress = peer.prefill.progress
        except aio.AioRpcError as error:
            _not_heard(peer, error)
        else:
            self._heard(peer, (peer.prefill,))

    def _heard(
        self,
        peer: Peer,
        said: Iterable[RootDescription | OwnerDescription | PrefillDescription | None],
    ) -> None:
        peer.lost = peer.misfit = ""
        for description in said:
            if description is None:
                continue
            try:
                check(self._pool.compatibility, description.compatibility)
            except ProtocolError as error:
                peer.misfit = str(error)


def _defect(peer: Peer) -> TknpError | None:
    """Why waiting for `peer` is in vain unless another process takes its place."""
    if peer.misfit:
        return ProtocolError(f"{peer.name} at {peer.address}: {peer.misfit}")
    if peer.progress.phase == Phase.PHASE_FAILED:
        return Unavailable(f"{peer.name} at {peer.address}: {peer.progress.error}")
    return None


def _not_heard(peer: Peer, error: aio.AioRpcError) -> None:
    """Absence may pass. Any other answer than the one asked for means another kind of process."""
    reason = error.details() or error.code().name
    if error.code() in _ABSENT:
        peer.lost = reason
    else:
        peer.misfit = f"{error.code().name}: {reason}"
    log.debug("%s at %s: %s", peer.name, peer.address, reason)
