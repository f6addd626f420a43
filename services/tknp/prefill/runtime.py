"""What one rank of a prefill replica consists of: weights, scratch pages, requests, sender."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import torch
from grpc import aio

from tknp.engine.backend import choose_backend
from tknp.engine.decode import TORCH_DTYPES
from tknp.engine.thread import EngineThread
from tknp.errors import Unavailable
from tknp.kv.pages import PagePool
from tknp.kv.size import page_bytes, pages_for
from tknp.kv.storage import KvStorage
from tknp.layout.prefill import replica_layout
from tknp.layout.rank import Rank
from tknp.model.tokenizer import load_tokenizer
from tknp.pool import Pool
from tknp.prefill.compute import Chunk, PrefillRank, first_row
from tknp.prefill.metrics import PrefillMetrics
from tknp.prefill.replica import Replica
from tknp.prefill.requests import LocalRequests
from tknp.rpc.lifecycle import Lifecycle
from tknp.sampling.grammar import Grammars
from tknp.sampling.params import SamplingParams
from tknp.transfer.base import Sender
from tknp.transfer.compatibility import build
from tknp.transfer.factory import make_sender
from tknp.transport.base import Transport
from tknp.v1.common_pb2 import Phase
from tknp.worker.memory import allocating

Connect = Callable[[Pool, int, int, torch.device], Transport]


class PrefillRuntime:
    """TP rank `t` of prefill replica `replica_index`. `connect` joins the replica's ranks.

    `channel`: opens a channel to an address of the pool. `alone`: no other rank computes in this
    process.
    """

    def __init__(
        self,
        pool: Pool,
        replica_index: int,
        t: int,
        siblings: Sequence[aio.Channel],
        connect: Connect,
        channel: Callable[[str], aio.Channel],
        *,
        alone: bool = False,
    ) -> None:
        self.pool = pool
        self.t = t
        self.tp = len(pool.config.prefill[replica_index].addresses)
        self.vocab_size = pool.checkpoint.config.vocab_size
        self.life = Lifecycle()
        self.grammars = Grammars(
            lambda: load_tokenizer(pool.checkpoint), self.vocab_size,
            pool.checkpoint.config.eos_ids,
        )  # fmt: skip
        self.requests: LocalRequests | None = None
        self.replica: Replica | None = None
        self.kv_transfer = ""
        self.compatibility = build(
            pool.checkpoint.config, model=pool.checkpoint.fingerprint,
            dtype=pool.config.dtype, page_size=pool.page_size,
        )  # fmt: skip
        self.metrics = PrefillMetrics(self, replica_index)
        self._index = replica_index
        self._siblings = siblings
        self._connect = connect
        self._alone = alone
        self._channel = channel
        self.rank: PrefillRank | None = None
        self._sender: Sender | None = None
        self._loader = EngineThread(f"prefill-load-{replica_index}-{t}")
        self._closing = False
        self._device = torch.device("cpu" if pool.config.device == "cpu" else f"cuda:{t}")

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt: scratch pages hold one of the longest context."""
        return self.pool.max_model_len

    async def prepare(self) -> None:
        """Load, join the replica, run a warm chunk, open for requests.

        Raises CapacityError where memory is short.
        """
        self._loop = asyncio.get_running_loop()
        self.rank = rank = await asyncio.wrap_future(self._loader.submit(self._build))
        config = self.pool.config
        self.life.enter(Phase.PHASE_WARMING)
        await self._warm_up(rank)
        scratch = PagePool(rank.storage.shape[2], self.pool.page_size, time.monotonic)
        layout = replica_layout(self.pool.checkpoint.config, config.dtype, self.tp)
        (shard,) = layout.shards(Rank(0, self.t))
        self._sender = make_sender(
            config.kv_transfer, rank.storage, shard, self.compatibility,
            timeout_s=config.timeout_s, channel=self._channel,
        )  # fmt: skip
        self.kv_transfer = self._sender.kind
        self.requests = LocalRequests(rank, scratch, self._sender)
        if self.t == 0:
            self.replica = Replica(
                self.requests, self._siblings, self._channel, vocab_size=self.vocab_size,
                chunk_tokens=config.prefill_chunk, compatibility=self.compatibility,
                addresses=config.prefill[self._index].addresses,
                one_sided=self._sender.kind == "nixl", lease_s=config.lease_s, broken=self.fail,
                metrics=self.metrics, grammars=self.grammars,
            )  # fmt: skip
        self.life.enter(Phase.PHASE_READY)

    def fail(self, reason: str) -> None:
        """This rank can't go on. Called on the event loop."""
        self.life.fail(reason)

    async def close(self) -> None:
        """End requests and their writes first, then threads and connections.

        Raises TknpError if a write stays in flight: the process has to end for it to be over.
        """
        self._closing = True
        self._loader.close(0)
        self.grammars.close()
        if self.replica is not None:
            await self.replica.close()
        if self.requests is not None:
            await self.requests.close()
        if self.rank is not None:
            await asyncio.to_thread(self.rank.close)
        if self._sender is not None:
            await self._sender.close()

    async def _warm_up(self, rank: PrefillRank) -> None:
        """One token, delivered nowhere, on all ranks of the replica at once."""
        row = first_row(SamplingParams(max_tokens=1), self.vocab_size, [0], 0)
        await asyncio.wrap_future(rank.submit(Chunk([0], 0, [1], _Nowhere(), row)))

    def _loaded(self, done_bytes: int, total_bytes: int) -> None:
        if self._closing:
            raise Unavailable("shutting down")
        self.life.loaded(done_bytes, total_bytes)

    def _broken(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self.fail, reason)

    def _build(self) -> PrefillRank:
        pool, config, device = self.pool, self.pool.config, self._device
        model = pool.checkpoint.config
        layout = replica_layout(model, config.dtype, self.tp)
        rank, dtype = Rank(0, self.t), TORCH_DTYPES[config.dtype]
        (shard,) = layout.shards(rank)
        need = layout.weight_bytes(rank)
        with allocating("weights", need, device):
            weights = pool.checkpoint.load(shard, dtype, device, self._loaded)
        backend = choose_backend(
            shard, page_size=pool.page_size, max_positions=pool.max_model_len + 1,
            dtype=dtype, device=device,
        )  # fmt: skip
        dense = backend.dense(weights)
        pages = 1 + pages_for(pool.max_model_len, pool.page_size)
        page = page_bytes(model, config.dtype, self.tp, pool.page_size)
        with allocating(f"KV pages of one prompt of {pool.max_model_len} tokens",
                        pages * page, device):  # fmt: skip
            storage = KvStorage(
                model.layers, pages, len(shard.kv_heads), pool.page_size, model.head_dim,
                dtype, device,
            )  # fmt: skip
        self.life.enter(Phase.PHASE_JOINING)
        transport = self._connect(pool, self._index, self.t, device)
        return PrefillRank(
            layout, self.t, transport,
            dense=dense, attention=backend.prefill_attention(), storage=storage,
            max_chunk=config.prefill_chunk, device=device, broken=self._broken,
            seconds=self.metrics.chunks, keep_cores=backend.keep_cores if self._alone else None,
        )  # fmt: skip


class _Nowhere:
    """The push of the warm chunk."""

    def push(self, layer: int, start: int, stop: int) -> None:
        return

    async def finish(self) -> int:
        return 0

    async def abort(self) -> None:
        return
