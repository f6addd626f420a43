"""What one decode rank consists of: weights, pages, transport and the engine thread.

load     weights of every held block, then pages in what memory is left
join     the data plane; the engine with a lane for every stream of this rank's node
submit   steps of all streams, in the order in which they came
"""

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
from tknp.engine.lanes import Lanes
from tknp.engine.recorder import Recorder
from tknp.engine.thread import EngineThread
from tknp.engine.times import StepTimes
from tknp.errors import Unavailable
from tknp.kv.pages import PagePool
from tknp.kv.storage import KvStorage
from tknp.layout.rank import Rank
from tknp.model.dense import BlocksDense, Dense
from tknp.model.tokenizer import load_tokenizer
from tknp.pool import Pool
from tknp.rpc.lifecycle import Lifecycle
from tknp.sampling.grammar import Grammars
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
    """Loads, joins and then runs steps, all on the engine thread.

    `connect` gives the data plane: torch.distributed in a process of its own, or a hub where ranks
    are threads. `books`: pages of the whole node, at TP rank 0 of a node that owns requests.
    `alone`: no other rank computes in this process.
    `submitted`, `stepped`: steps so far, of all streams. `warm`: set by the first that passed.
    """

    def __init__(
        self,
        pool: Pool,
        rank: Rank,
        connect: Connect,
        clock: Callable[[], float],
        *,
        alone: bool = False,
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
        model = pool.checkpoint.config
        self.grammars = Grammars(
            lambda: load_tokenizer(pool.checkpoint), model.vocab_size, model.eos_ids
        )
        self._connect = connect
        self._alone = alone
        self._clock = clock
        self._transport: Transport | None = None
        self._dense: Dense | None = None
        self._engine: DecodeRank | None = None
        self._lanes: Lanes | None = None
        self.recorder = Recorder()
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
        """Queue one step; at most a few of a stream are in flight."""
        if self._lanes is None:
            raise Unavailable(f"rank {self.rank} has not joined the data plane yet")
        self.submitted += 1
        future = self._lanes.submit(delta)
        future.add_done_callback(self._stepped)
        self._thread.post(self._lanes.run)
        return future

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
    def times(self) -> tuple[StepTimes, ...]:
        """Where the seconds of steps went, by stream; empty until the data plane is joined."""
        return self._engine.times if self._engine is not None else ()

    @property
    def sent_bytes(self) -> Traffic:
        """What was sent on the data plane so far."""
        return self._transport.sent_bytes if self._transport is not None else Traffic()

    def fail(self, reason: str) -> None:
        """This rank can't go on, and its peers can't wait for it. Called on the event loop."""
        if self.life.fail(reason) and self._transport is not None:
            self._transport.abort(reason)

    def close(self) -> None:
        """Let go of peers and stop the engine thread; one that hangs is left behind."""
        self._closing = True
        self.grammars.close()
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
        pool, layout, rank = self.pool, self.pool.layout, self.rank
        dtype = TORCH_DTYPES[pool.config.dtype]
        self.backend = choose_backend(
            layout.heads(rank), page_size=pool.page_size, max_positions=pool.max_model_len + 1,
            dtype=dtype, device=self.device,
        )  # fmt: skip
        with allocating("weights", pool.weight_bytes(rank.node), self.device):
            self._dense = self._load_blocks(dtype)
        measured = measured_kv_bytes(self.device)
        pages = pool.pages(rank.node, measured)
        if not pages:
            return
        layers, heads = layout.kv_layers(rank), layout.kv_heads(rank)
        with allocating(f"{pages} KV pages", pages * pool.page_bytes(rank.node), self.device):
            self.storage = KvStorage(
                len(layers), pages, len(heads), pool.page_size, layout.config.head_dim, dtype,
                self.device,
            )  # fmt: skip
        if pool.config.synthetic_kv:
            self.storage.fill(seed=rank.index(layout.tp))
        self.pages = pages
        self.receiver = make_receiver(
            pool.config.kv_transfer, self.storage, layers, heads, self.windows
        )
        if rank.t == 0:
            self.books = PagePool(pages, pool.page_size, self._clock)

    def _load_blocks(self, dtype: torch.dtype) -> Dense | None:
        """Read one block after another, each packed before the next; None where there is none."""
        shards = self.pool.layout.shards(self.rank)
        parts: list[Dense] = []
        loaded = 0
        for index, shard in enumerate(shards):
            left = len(shards) - index

            def progress(done: int, total: int, before: int = loaded, left: int = left) -> None:
                self._loaded(before + done, before + left * total)  # blocks are about equal

            weights = self.pool.checkpoint.load(shard, dtype, self.device, progress)
            parts.append(self.backend.dense(weights))
            loaded += weights.size_bytes
        if len(parts) > 1:
            return BlocksDense(shards, parts)
        return parts[0] if parts else None

    def _join(self) -> None:
        pool = self.pool
        self._transport = self._connect(pool, self.rank, self.device)
        attention = self.backend.decode_attention() if self.storage is not None else None
        self._engine = DecodeRank(
            pool.layout, self.rank, self._transport,
            dense=self._dense, attention=attention, storage=self.storage,
            epoch=pool.config.epoch, max_batch=pool.config.max_batch, device=self.device,
            recorder=self.recorder, grammars=self.grammars,
        )  # fmt: skip
        self._lanes = Lanes(self._engine, self.device)
        # Last, since threads that this one starts would stay on its core.
        if self._alone:
            self.grammars.start()
        cores = self.backend.keep_cores() if self._alone else ()
        if cores:
            log.info("threads that compute stay on cores %s, one each", cores)

    def _stepped(self, step: Future[Outcome]) -> None:
        """On the engine thread, as soon as a step is over."""
        if step.cancelled() or step.exception() is not None:
            return
        self.stepped += 1
        seconds = step.result().seconds
        self._seconds.append(seconds)
        self.metrics.steps.observe(seconds)
