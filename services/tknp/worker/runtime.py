"""What one decode rank consists of: weights, pages, transport and the engine thread."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from tknp.engine.backend import choose_backend
from tknp.engine.batch import Delta
from tknp.engine.decode import TORCH_DTYPES, DecodeRank, Outcome
from tknp.kv.pages import PagePool
from tknp.kv.storage import KvStorage
from tknp.layout.rank import Rank
from tknp.pool import Pool
from tknp.rpc.lifecycle import Lifecycle
from tknp.transfer.factory import make_receiver
from tknp.transfer.receiver import Receiver
from tknp.transfer.windows import WriteWindows
from tknp.transport.base import Transport
from tknp.v1.common_pb2 import Phase
from tknp.worker.memory import measured_kv_bytes

Connect = Callable[[Pool, Rank, torch.device], Transport]
_STEPS_REMEMBERED = 64


class DecodeRuntime:
    """Built by `start`, which blocks; steps run one after another on the engine thread.

    `connect` gives the data plane: torch.distributed in a process of its own, or a hub where ranks
    are threads. `books`: pages of the whole node, at TP rank 0 of a node that owns requests.
    """

    def __init__(
        self, pool: Pool, rank: Rank, connect: Connect, clock: Callable[[], float]
    ) -> None:
        self.pool = pool
        self.rank = rank
        self.life = Lifecycle()
        self.pages = 0
        self.storage: KvStorage | None = None
        self.books: PagePool | None = None
        self.receiver: Receiver | None = None
        self.windows = WriteWindows()
        self.device = torch.device("cpu" if pool.config.device == "cpu" else f"cuda:{rank.t}")
        self._connect = connect
        self._clock = clock
        self._transport: Transport | None = None
        self._engine: DecodeRank | None = None
        self._seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"engine-{rank.node}-{rank.t}")

    async def load(self) -> None:
        """Read the weights and allocate the pages."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._load)

    async def join(self) -> None:
        """Meet the other ranks of the pool on the data plane."""
        self.life.enter(Phase.PHASE_JOINING)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._join)
        self.life.enter(Phase.PHASE_READY)

    def submit(self, delta: Delta) -> Future[Outcome]:
        """Queue one step; at most a few are in flight."""
        return self._thread.submit(self._step, delta)

    @property
    def step_s(self) -> float:
        """Median seconds of recent steps."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    def fail(self, reason: str) -> None:
        """This rank can't go on, and its peers can't wait for it. Called on the event loop."""
        if self.life.fail(reason) and self._transport is not None:
            self._transport.abort(reason)

    def close(self) -> None:
        """Let go of peers and stop the engine thread."""
        if self._transport is not None:
            self._transport.abort("shutting down")
            self._transport.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self.receiver is not None:
            self.receiver.close()

    def _load(self) -> None:
        pool, shard = self.pool, self.pool.shard(self.rank)
        dtype = TORCH_DTYPES[pool.config.dtype]
        weights = pool.checkpoint.load(shard, dtype, self.device, self.life.loaded)
        self.backend = choose_backend(
            shard, page_size=pool.page_size, max_positions=pool.max_model_len + 1,
            dtype=dtype, device=self.device,
        )  # fmt: skip
        self._dense = self.backend.dense(weights) if len(shard.layers) else None
        measured = measured_kv_bytes(self.device)
        self.pages = pool.pages(self.rank.node, measured)
        if self.pages:
            self.storage = KvStorage(
                shard.config.layers, self.pages, len(shard.kv_heads), pool.page_size,
                shard.config.head_dim, dtype, self.device,
            )  # fmt: skip
            self.receiver = make_receiver(
                pool.config.kv_transfer, self.storage, range(shard.config.layers),
                shard.kv_heads, self.windows,
            )  # fmt: skip
            if self.rank.t == 0:
                self.books = PagePool(self.pages, pool.page_size, self._clock)

    def _join(self) -> None:
        pool = self.pool
        self._transport = self._connect(pool, self.rank, self.device)
        attention = self.backend.decode_attention() if self.storage is not None else None
        self._engine = DecodeRank(
            pool.layout, self.rank, self._transport,
            dense=self._dense, attention=attention, storage=self.storage,
            epoch=pool.config.epoch, max_batch=pool.config.max_batch, device=self.device,
        )  # fmt: skip

    def _step(self, delta: Delta) -> Outcome:
        if self._engine is None:
            raise RuntimeError("a step came before the data plane was joined")
        outcome = self._engine.step(delta)
        self._seconds.append(outcome.seconds)
        return outcome
