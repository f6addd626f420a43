"""What one rank of a prefill replica consists of: weights, scratch pages, requests, sender."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from grpc import aio

from tknp.engine.decode import TORCH_DTYPES
from tknp.kv.pages import PagePool
from tknp.kv.size import pages_for
from tknp.kv.storage import KvStorage
from tknp.layout.prefill import replica_layout
from tknp.layout.rank import Rank
from tknp.model.dense import TorchDense
from tknp.pool import Pool
from tknp.prefill.compute import PrefillRank
from tknp.prefill.replica import Replica
from tknp.prefill.requests import LocalRequests
from tknp.rpc.lifecycle import Lifecycle
from tknp.transfer.compatibility import build
from tknp.transfer.factory import make_sender
from tknp.transport.base import Transport
from tknp.v1.common_pb2 import Phase

Connect = Callable[[Pool, int, int, torch.device], Transport]


class PrefillRuntime:
    """TP rank `t` of prefill replica `replica_index`. `connect` joins the replica's ranks.

    `channel`: opens a channel to an address of the pool.
    """

    def __init__(
        self,
        pool: Pool,
        replica_index: int,
        t: int,
        siblings: Sequence[aio.Channel],
        connect: Connect,
        channel: Callable[[str], aio.Channel],
    ) -> None:
        self.pool = pool
        self.t = t
        self.tp = len(pool.config.prefill[replica_index].addresses)
        self.vocab_size = pool.checkpoint.config.vocab_size
        self.life = Lifecycle()
        self.requests: LocalRequests | None = None
        self.replica: Replica | None = None
        self.kv_transfer = ""
        self.compatibility = build(
            pool.checkpoint.config, model=pool.checkpoint.fingerprint,
            dtype=pool.config.dtype, page_size=pool.page_size,
        )  # fmt: skip
        self._index = replica_index
        self._siblings = siblings
        self._connect = connect
        self._channel = channel
        self._rank: PrefillRank | None = None
        self._device = torch.device("cpu" if pool.config.device == "cpu" else f"cuda:{t}")

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: scratch pages hold one of the longest context."""
        return self.pool.max_model_len

    async def prepare(self) -> None:
        """Load, join the replica, open for requests."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as loader:
            rank = await loop.run_in_executor(loader, self._build)
        self._rank = rank
        config = self.pool.config
        scratch = PagePool(rank.storage.shape[2], self.pool.page_size, time.monotonic)
        shard = replica_layout(self.pool.checkpoint.config, config.dtype, self.tp).shard(
            Rank(0, self.t)
        )
        sender = make_sender(
            config.kv_transfer,
            rank.storage,
            shard,
            self.compatibility,
            timeout_s=config.timeout_s,
            channel=self._channel,
        )
        self.kv_transfer = sender.kind
        self.requests = LocalRequests(rank, scratch, sender)
        if self.t == 0:
            self.replica = Replica(
                self.requests, self._siblings, self._channel, vocab_size=self.vocab_size,
                chunk_tokens=config.prefill_chunk, compatibility=self.compatibility,
                lease_s=config.lease_s,
            )  # fmt: skip
        self._sender = sender
        self.life.enter(Phase.PHASE_READY)

    async def close(self) -> None:
        if self.replica is not None:
            await self.replica.close()
        if self._rank is not None:
            await asyncio.to_thread(self._rank.close)
            await self._sender.close()

    def _build(self) -> PrefillRank:
        pool, config = self.pool, self.pool.config
        layout = replica_layout(pool.checkpoint.config, config.dtype, self.tp)
        shard, dtype = layout.shard(Rank(0, self.t)), TORCH_DTYPES[config.dtype]
        weights = pool.checkpoint.load(shard, dtype, self._device, self.life.loaded)
        self.life.enter(Phase.PHASE_JOINING)
        transport = self._connect(pool, self._index, self.t, self._device)
        pages = 1 + pages_for(pool.max_model_len, pool.page_size)
        storage = KvStorage(
            shard.config.layers, pages, len(shard.kv_heads), pool.page_size,
            shard.config.head_dim, dtype, self._device,
        )  # fmt: skip
        return PrefillRank(
            layout, self.t, transport, dense=TorchDense(weights), storage=storage,
            page_size=pool.page_size, max_positions=pool.max_model_len + 1,
            max_chunk=config.prefill_chunk, device=self._device,
        )  # fmt: skip
