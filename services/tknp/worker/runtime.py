"""What one decode rank consists of: weights, pages, transport and the engine thread."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import torch

from tknp.engine.backend import choose_backend
from tknp.engine.batch import Delta
from tknp.engine.decode import TORCH_DTYPES, DecodeRank, Outcome
from tknp.engine.thread import EngineThread
from tknp.engine.times import StepTimes
from tknp.errors import Unavailable
from tknp.kv.pages import PagePool
from tknp.kv.size import page_bytes
from tknp.kv.storage import KvStorage
from tknp.layout.rank import Rank
from tknp.pool import Pool
from tknp.rpc.lifecycle import Lifecycle
from tknp.transfer.factory import make_receiver
from tknp.transfer.receiver import Receiver
from tknp.transfer.windows import WriteWindows
from tknp.transport.base import Traffic, Transport
from tknp.v1.common_pb2 import Phase
from tknp.worker.memory import allocating, measured_kv_bytes
from tknp.worker.metrics import RankMetrics

log = logging.getLogger(__name__)
Connect = Callable[[Pool, Rank, torch.device], Transport]
_STEPS_REMEMBERED = 64
_CLOSE_S = 2.0


class DecodeRuntime:
    """Built by `start`, which blocks; steps run one after another on the engine thread.

    `connect` gives the data plane: torch.distributed in a process of its own, or a hub where ranks
    are threads. `books`: pages of the whole node, at TP rank 0 of a node that owns requests.
    `submitted`, `stepped`: steps so far. `warm`: set by the first that passed.
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
        self.submitted = 0
        self.stepped = 0
        self.warm = asyncio.Event()
        self._seconds: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self.metrics = RankMetrics(self)
        self._thread = EngineThread(f"engine-{rank.node}-{rank.t}")
        self._closing = False

    async def load(self) -> None:
        """Read the weights and allocate the pages. Raises CapacityError where memory is short."""
        await asyncio.wrap_future(self._thread.submit(self._load))

    async def join(self) -> None:
        """Meet the other ranks of the pool on the data plane."""
        self.life.enter(Phase.PHASE_JOINING)
        await asyncio.wrap_future(self._thread.submit(self._join))
        self.life.enter(Phase.PHASE_WARMING)

    def submit(self, delta: Delta) -> Future[Outcome]:
        """Queue one step; at most a few are in flight."""
        self.submitted += 1
        return self._thread.submit(self._step, delta)

    def passed(self) -> None:
        """A step has passed on this rank and its TP peers: the first one makes it ready."""
        if not self.warm.is_set():
            self.life.enter(Phase.PHASE_READY)
            self.warm.set()

    @property
    def step_s(self) -> float:
        """Median seconds of recent steps."""
        return statistics.median(self._seconds) if self._seconds else 0.0

    @property
    def times(self) -> StepTimes | None:
        """Where the seconds of steps went; None until the data plane is joined."""
        return self._engine.times if self._engine is not None else None

    @property
    def sent_bytes(self) -> Traffic:
        """Payload sent on the data plane so far."""
        return self._transport.sent_bytes if self._transport is not None else Traffic()

    def fail(self, reason: str) -> None:
        """This rank can't go on, and its peers can't wait for it. Called on the event loop."""
        if self.life.fail(reason) and self._transport is not None:
            self._transport.abort(reason)

    def close(self) -> None:
        """Let go of peers and stop the engine thread; one that hangs is left behind."""
        self._closing = True
        if self._transport is not None:
            self._transport.abort("shutting down")
            self._transport.close()
        if not self._thread.close(_CLOSE_S):
            log.warning("rank %s ends while its engine is still busy", self.rank)
        elif self.receiver is not None:
            self.receiver.close()

    def _loaded(self, done_bytes: int, total_bytes: int) -> None:
        if self._closing:
            raise Unavailable("shutting down")
        self.life.loaded(done_bytes, total_bytes)

    def _load(self) -> None:
        pool, shard = self.pool, self.pool.shard(self.rank)
        dtype = TORCH_DTYPES[pool.config.dtype]
        with allocating("weights", pool.weight_bytes(self.rank.node), self.device):
            weights = pool.checkpoint.load(shard, dtype, self.device, self._loaded)
        self.backend = choose_backend(
            shard, page_size=pool.page_size, max_positions=pool.max_model_len + 1,
            dtype=dtype, device=self.device,
        )  # fmt: skip
        self._dense = self.backend.dense(weights) if len(shard.layers) else None
        measured = measured_kv_bytes(self.device)
        pages = pool.pages(self.rank.node, measured)
        if pages:
            page = page_bytes(shard.config, pool.config.dtype, pool.layout.tp, pool.page_size)
            with allocating(f"{pages} KV pages", pages * page, self.device):
                self.storage = KvStorage(
                    shard.config.layers, pages, len(shard.kv_heads), pool.page_size,
                    shard.config.head_dim, dtype, self.device,
                )  # fmt: skip
            self.pages = pages
            self.receiver = make_receiver(
                pool.config.kv_transfer, self.storage, range(shard.config.layers),
                shard.kv_heads, self.windows,
            )  # fmt: skip
            if self.rank.t == 0:
                self.books = PagePool(pages, pool.page_size, self._clock)

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
        self.stepped += 1
        self._seconds.append(outcome.seconds)
        self.metrics.steps.observe(outcome.seconds)
        return outcome
