"""What the coordinator measures; see `tknp.metrics`.

Requests of the warm-up appear nowhere but among the running ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tknp.coordinator.request import Request
from tknp.coordinator.scheduler import Scheduler
from tknp.errors import TknpError
from tknp.layout.owners import NodeLoad
from tknp.metrics import table
from tknp.metrics.instruments import Labels, reason_of
from tknp.metrics.registry import Registry
from tknp.v1.common_pb2 import Phase

if TYPE_CHECKING:
    from tknp.coordinator.driver import Driver

_USUAL_REFUSALS = ("invalid_argument", "resource_exhausted", "unavailable")


class CoordinatorMetrics:
    """`driver` is read at every scrape."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.registry = registry = Registry("coordinator")
        self._ttft = registry.histogram(table.TIME_TO_FIRST_TOKEN)
        self._itl = registry.histogram(table.INTER_TOKEN_LATENCY)
        self._e2e = registry.histogram(table.REQUEST_E2E)
        self._normalized = registry.histogram(table.NORMALIZED_LATENCY)
        self._queue = registry.histogram(table.REQUEST_QUEUE)
        self._prefill = registry.histogram(table.REQUEST_PREFILL)
        self._refusals = registry.counter(table.REFUSALS, *_USUAL_REFUSALS)
        self._prompt_tokens = registry.counter(table.PROMPT_TOKENS)
        self._tokens = registry.counter(table.GENERATION_TOKENS)
        self._step_work = registry.counter(table.COORDINATOR_STEP, "launch", "streams")
        registry.ready(lambda: driver.phase == Phase.PHASE_READY)
        registry.read(table.EPOCH, lambda: {(): driver.pool.config.epoch})
        registry.read(
            table.REQUESTS, lambda: {(outcome,): n for outcome, n in vars(driver.counts).items()}
        )
        self._read(table.REQUESTS_WAITING, lambda scheduler: len(scheduler.waiting))
        self._read(table.REQUESTS_PREFILLING, lambda scheduler: len(scheduler.placed))
        self._read(table.REQUESTS_RUNNING, lambda scheduler: scheduler.running)
        self._read(table.PREEMPTIONS, lambda scheduler: scheduler.preemptions)
        self._read(table.STEPS, lambda scheduler: scheduler.steps)
        registry.read(table.KV_USAGE, lambda: self._owners(lambda load: load.used / load.pages))
        registry.read(
            table.KV_CAPACITY,
            lambda: self._owners(lambda load: load.pages * driver.pool.page_size),
        )

    def refused(self, error: TknpError) -> None:
        """A request was refused before it was queued."""
        self._refusals.add(1, reason_of(error))

    def token(self, request: Request, now_s: float, last: bool) -> None:
        """`request` has been given a token, its `last` one."""
        if request.pinned is not None:
            return
        self._tokens.add(1)
        count = len(request.generated) - request.given
        if count == 1:
            self._prompt_tokens.add(len(request.prompt))
            self._ttft.observe(now_s - request.arrived_s)
            self._queue.observe(request.placed_s - request.arrived_s)
            self._prefill.observe(now_s - request.placed_s)
        else:
            self._itl.observe(now_s - request.token_s)
        request.token_s = now_s
        if last:
            self.completed(request, now_s)

    def completed(self, request: Request, now_s: float) -> None:
        """`request` has ended well."""
        self._e2e.observe(now_s - request.arrived_s)
        self._normalized.observe((now_s - request.arrived_s) / len(request.generated))

    def step(self, launch_s: float, streams_s: float) -> None:
        """Between a step's result and the next one sent, and on handing tokens to streams."""
        self._step_work.add(launch_s, "launch")
        self._step_work.add(streams_s, "streams")

    def _read(self, metric: table.Metric, value: Callable[[Scheduler], float]) -> None:
        """Read `metric` from the scheduler; 0 before there is one."""

        def reader() -> dict[Labels, float]:
            serving = self._driver.serving
            return {(): value(serving.scheduler) if serving is not None else 0.0}

        self.registry.read(metric, reader)

    def _owners(self, value: Callable[[NodeLoad], float]) -> dict[Labels, float]:
        serving = self._driver.serving
        loads = serving.scheduler.loads if serving is not None else ()
        return {(str(node),): value(load) for node, load in enumerate(loads) if load.pages}
