"""The life of a pool, from the first Describe to the last stream.

LOADING    processes are asked until all are ready and fit together
WARMING    one short request at every owner, in every stream
READY      requests are taken
DRAINING   no new requests; open ones go on until they end or time is up
FAILED     steps can't go on: open requests got the reason, later ones are refused with it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path

from tknp.coordinator.division import Division
from tknp.coordinator.limits import Limits
from tknp.coordinator.metrics import CoordinatorMetrics
from tknp.coordinator.recording import RecordingScheduler
from tknp.coordinator.request import Event, Pin, Request
from tknp.coordinator.scheduler import Scheduler
from tknp.coordinator.serving import Counts, Serving
from tknp.coordinator.silence import Silence
from tknp.coordinator.startup import Peers
from tknp.errors import TknpError, Unavailable
from tknp.kv.holding import Key
from tknp.pool import Pool
from tknp.rpc.security import Security
from tknp.rpc.stall import STALLS_A_TIMEOUT, Stall
from tknp.sampling.params import SamplingParams
from tknp.v1.common_pb2 import Phase

log = logging.getLogger(__name__)
_WARM_UP_TOKENS = 3


class Driver:
    """One pool. `start` returns at once; `phase` and `error` tell how far it is.

    `serving` is there from WARMING on, and stays to be looked at.
    """

    def __init__(self, pool: Pool, clock: Callable[[], float], security: Security) -> None:
        self.pool = pool
        self.peers = Peers(pool, security)
        self.clock = clock
        self.phase: Phase.ValueType = Phase.PHASE_LOADING
        self.error = ""
        self.counts = Counts()
        self.ready = asyncio.Event()
        self.failed = asyncio.Event()
        self.hung = False
        self._silence = Silence(clock)
        self._stalls = [
            Stall(clock, STALLS_A_TIMEOUT * pool.config.timeout_s)
            for _ in range(pool.layout.streams)
        ]
        self.serving: Serving | None = None
        self.metrics = CoordinatorMetrics(self)
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._spawn(self._prepare())

    def open(self) -> Serving:
        """Where requests go; raises Unavailable saying why the pool takes none."""
        if self.serving is None or self.phase != Phase.PHASE_READY:
            why = self.error or Phase.Name(self.phase).removeprefix("PHASE_").lower()
            raise Unavailable(f"the pool takes no requests: {why}")
        return self.serving

    async def drain(self, longest_s: float) -> None:
        """Take no more requests and let open ones end, for at most `longest_s`."""
        if self.serving is None or self.phase != Phase.PHASE_READY:
            return
        self.phase = Phase.PHASE_DRAINING
        try:
            async with asyncio.timeout(longest_s):
                await self.serving.idle()
        except TimeoutError:
            self.serving.fail_all(f"the pool is shutting down, having drained for {longest_s:g} s")

    async def stop(self) -> None:
        if self.serving is not None:
            self.serving.fail_all("the coordinator is shutting down")
            self.serving.close()
            if isinstance(self.serving.scheduler, RecordingScheduler):
                self.serving.scheduler.close()
        for task in self._tasks:
            task.cancel()
        await self.peers.close()

    def fail(self, reason: str) -> None:
        """The pool can't go on: end every open request with `reason`."""
        if self.failed.is_set():
            return
        log.error("pool failed: %s", reason)
        self.phase, self.error = Phase.PHASE_FAILED, reason
        self.failed.set()
        if self.serving is not None:
            self.serving.fail_all(reason)

    async def look(self) -> None:
        """Ask how the pool's processes are; a decode rank that is silent is the pool's end.

        A prefill replica that is silent is only not used until it answers again.
        """
        await self.peers.refresh()
        silent = self._silence.look(self.peers.all)
        decode = [peer for ranks in self.peers.nodes for peer in ranks if peer in silent]
        for peer in decode:
            self.fail(f"{peer.name} at {peer.address} {peer.progress.error}")
        streams = self.serving.scheduler.streams if self.serving is not None else []
        for stream, stall in zip(streams, self._stalls, strict=False):
            pending = len(stream.in_flight)
            hung = stall.look(pending > 0, stream.steps - pending)
            if hung:
                self.hung = True
                which = f" of stream {stream.number}" if len(streams) > 1 else ""
                self.fail(f"step {stream.steps - pending}{which} hangs: {hung}")

    async def _prepare(self) -> None:
        try:
            await self.peers.ready(self._silence.look)
            self.phase = Phase.PHASE_WARMING
            scheduler = self._make_scheduler()
            self.serving = Serving(
                self.pool, self.peers, scheduler, self.counts, self.metrics,
                self.clock, self.fail,
            )  # fmt: skip
            self._spawn(self.serving.run())
            await self._warm_up(self.serving)
            await self.peers.refresh()  # so that status shows them warm from the start
        except TknpError as error:
            self.fail(str(error))
            return
        if not self.failed.is_set():
            self.phase = Phase.PHASE_READY
            self.ready.set()

    def _make_scheduler(self) -> Scheduler:
        config, model = self.pool.config, self.pool.checkpoint.config
        prefill = [peer.prefill for ranks in self.peers.prefill for peer in ranks]
        prompts = [p.max_prompt_tokens for p in prefill if p is not None]
        limits = Limits(
            pages=self.peers.pages(),
            division=Division.of(self.pool.layout, self.pool.page_size),
            max_batch=config.max_batch,
            max_queue=config.max_queue,
            max_model_len=self.pool.max_model_len,
            max_prompt_tokens=min(prompts, default=self.pool.max_model_len),
            eos_ids=frozenset(model.eos_ids),
            reserve_ratio=config.reserve_ratio,
            hold_until=config.hold_until,
        )
        if not config.record:
            return Scheduler(limits, config.epoch)
        path = Path(config.record)
        return RecordingScheduler(limits, config.epoch, path=path, clock=self.clock)

    async def _warm_up(self, serving: Serving) -> None:
        """One short request at every owner: prefill, transfer and steps work, and are warm.

        In streams whose requests are kept by all owners together one is enough.
        """
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True)
        division = serving.scheduler.limits.division
        pins = [
            Pin(stream, node)
            for stream, owners in enumerate(division.streams)
            for node in (owners[:1] if division.together else owners)
        ]
        requests = [
            Request(Key(f"warm-up-{i}", 0), (0,), params, self.clock(), pinned=pin)
            for i, pin in enumerate(pins)
        ]
        for request in requests:
            serving.scheduler.limits.output_tokens(len(request.prompt), params.max_tokens)
            serving.submit(request)
        for request in requests:
            event = Event()
            while event.finish is None:
                event = await request.events.get()
                if event.error is not None:
                    raise event.error

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> None:
        """Run for as long as the pool does; what it raises is the pool's failure."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("the coordinator is broken", exc_info=error)
            self.fail(f"the coordinator is broken: {type(error).__name__}: {error}")
