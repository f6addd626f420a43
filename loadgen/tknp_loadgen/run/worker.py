"""One worker: sends its rows on time and writes down what comes back.

    connect -> warm up with other prompts -> encode ahead -> freeze GC -> ready
    -> release every row at its deadline (see `pacing`) -> drain -> close

There is no task for a request: the timer's callback writes it to its socket, the socket's callback
tells its `records.Request` what came, and the end of it comes back here. Whatever can wait, does
(`_chores`): encoding further prompts and writing records happen while nothing is due.

Stopping (Ctrl-C, saturation, too many errors) sends nothing more, not even what --max-concurrency
holds back; what is open then drains, or is interrupted. A callback that raises would take along
whatever it was to do next, and the run would wait for that for ever: the first such defect stops
the run, which raises it. The garbage collector is off meanwhile, so nothing here may leave cycles
behind.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tknp_loadgen.measure.slo import DEFAULT, Slo
from tknp_loadgen.run.footprint import max_rss_bytes
from tknp_loadgen.run.ledger import MOST_WAITING, Ledger
from tknp_loadgen.run.pacing import ClosedLoop, OpenLoop, Pacing
from tknp_loadgen.run.payloads import Payloads
from tknp_loadgen.run.plan import WorkerPlan
from tknp_loadgen.run.records import Files, Request
from tknp_loadgen.run.timer import Timer
from tknp_loadgen.target.base import Clock, Ending, Failure, Target, Unmeasured
from tknp_loadgen.trace.format import Trace
from tknp_loadgen.trace.prompts import Prompts

TICK_S = 0.02
WARM_UP_TIMEOUT_S = 600.0
LOADING_S = 120.0  # so long is a server asked again that says it is not there yet
LOADING_TICK_S = 0.5
_WRITING_NS = 300_000  # what writing a record may take on a slow core
_PAUSE_S = 0.001
_TIMED_OUT, _CANCELLED, _INTERRUPTED = "timeout", "cancelled", "interrupted"


class Worker:
    """Runs one plan once: `prepare`, then `run` from the moment of release."""

    def __init__(
        self, plan: WorkerPlan, trace: Trace, target: Target, clock: Clock, timer: Timer
    ) -> None:
        self._plan, self._trace, self._target, self._clock = plan, trace, target, clock
        load = plan.load
        self._rows = load.rows(trace, plan.worker, plan.workers)
        text_file = Path(load.text_file) if load.text_file else None
        self._prompts = Prompts(trace, text_file)
        self._payloads = Payloads(self._rows, trace.output_tokens, self._prompts, target, clock)
        self._files = Files(Path(plan.directory), plan.worker)
        self._slo = Slo.parse(plan.slo or DEFAULT)
        self._ledger = Ledger(self._files, self._slo)
        loop = ClosedLoop if trace.users else OpenLoop
        self._pacing: Pacing = loop(trace, self._rows, timer, clock, self._release)
        self._cancelled_rows = load.cancelled(trace)
        self._permits = load.max_concurrency or len(self._rows)
        self._held: deque[tuple[Request, bytes]] = deque()  # until another one ends
        self._release_ns = self._released = 0
        self._open: dict[int, Request] = {}
        self._drained = asyncio.Event()
        self._busy_with_chores = False
        self._defect: Exception | None = None  # what a callback raised
        self._loop_lags_ms: list[float] = []

    async def prepare(self) -> None:
        """Everything that may take long; raises TargetError or Failure (of a warm-up)."""
        await self._target.open(self._plan.load.pool_size(self._trace, self._rows))
        warmups = range(self._plan.worker, self._plan.load.num_warmups, self._plan.workers)
        async with asyncio.timeout(WARM_UP_TIMEOUT_S):
            await asyncio.gather(*(self._warm_up(number) for number in warmups))
        while self._payloads.wants_more:
            self._payloads.encode_next()
            await asyncio.sleep(0)
        gc.collect()
        gc.freeze()

    async def run(self, release_ns: int) -> dict[str, Any]:
        """Send everything; returns what the client itself looked like meanwhile.

        Raises what a callback raised, if one did.
        """
        self._release_ns = release_ns
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._broken)
        gc.disable()
        cpu_s, began_ns = time.process_time(), self._clock()
        ticker = asyncio.create_task(self._tick())
        try:
            self._pacing.start(release_ns)
            await self._pacing.done.wait()
            while self._open and self._defect is None:
                self._drained.clear()
                await self._drained.wait()
            if self._defect is not None:
                raise self._defect
            self._ledger.write_all()
        finally:
            loop.set_exception_handler(None)
            ticker.cancel()
            wall_s = (self._clock() - began_ns) / 1e9
            cpu_s = time.process_time() - cpu_s
            gc.enable()
            gc.unfreeze()
            self._files.close()
        lags = sorted(self._loop_lags_ms) or [0.0]
        return {
            "worker": self._plan.worker, "rows": len(self._rows), "released": self._released,
            "cpu_ratio": cpu_s / wall_s if wall_s > 0 else 0.0, "wall_s": wall_s,
            "loop_lag_p50_ms": lags[len(lags) // 2], "loop_lag_p99_ms": lags[len(lags) * 99 // 100],
            "late_encodings": self._payloads.late,
            "late_connections": self._target.late_connections,
            "max_rss_bytes": max_rss_bytes(),
        }  # fmt: skip

    def stop(self, interrupt: bool) -> None:
        """Send nothing more; `interrupt` also ends what has been sent."""
        self._pacing.stop()
        held = [request.row for request, _ in self._held]
        self._held.clear()
        for row in tuple(self._open) if interrupt else held:
            if row in self._open:  # held or not, it may have ended by itself
                self._end(row, _INTERRUPTED)

    def progress(self) -> Mapping[str, Any]:
        """Cumulative counts, and medians of recent requests."""
        now_ns, bound_ms = self._clock(), self._slo.bounds.get("ntpot", float("inf"))
        overdue = sum(
            1 for request in self._open.values()
            if (now_ns - request.scheduled_ns) / 1e6 / request.wanted_tokens > bound_ms
        )  # fmt: skip
        return {
            "released": self._released, "open": len(self._open), "overdue": overdue,
            **self._ledger.progress(),
        }  # fmt: skip

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The event loop's exception handler."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        callback = "handle" in context  # not a connection, which ends by itself
        if callback and isinstance(error, Exception) and self._defect is None:
            self._defect = error
            try:
                self.stop(interrupt=True)
            finally:
                self._drained.set()

    def _release(self, row: int, due_ns: int) -> None:
        """The way out: nothing here may wait."""
        payload, answer = self._payloads.take(row)
        request = Request(
            row, due_ns, self._release_ns, int(self._trace.output_tokens[row]), self._clock,
            self._files, self._ended, answer,
        )  # fmt: skip
        self._open[row] = request
        self._released += 1
        if self._permits > 0:
            self._begin(request, payload)
        else:
            self._held.append((request, payload))
        load = self._plan.load
        if load.request_timeout_s is not None:
            left_s = load.request_timeout_s - (self._clock() - due_ns) / 1e9
            self._limit(request, left_s, _TIMED_OUT)
        if row in self._cancelled_rows:
            self._limit(request, load.cancel_after_s, _CANCELLED)
        if self._payloads.wants_more:
            self._have_chores()

    def _begin(self, request: Request, payload: bytes) -> None:
        self._permits -= 1
        request.permitted = True
        if self._plan.load.max_concurrency is not None:
            request.permitted_ns = self._clock()
        try:
            call = self._target.begin(payload, request)
        except Exception as error:  # a defect here must not pass for a good answer
            if request.row in self._open:
                request.failed(f"{type(error).__name__}: {error}")
            return
        if request.row in self._open:
            request.call = call

    def _ended(self, request: Request, ending: Ending | None, reason: str) -> None:
        """The target has told the end of a request."""
        status = "error"
        if ending is not None:
            status, reason = request.verdict(ending, self._plan.load.any_length)
        self._finish(request, status, reason, ending)

    def _limit(self, request: Request, left_s: float, status: str) -> None:
        if request.row in self._open:
            timer = asyncio.get_running_loop().call_later(left_s, self._end, request.row, status)
            request.timers = (*request.timers, timer)

    def _end(self, row: int, status: str) -> None:
        """End a request from this side."""
        request = self._open[row]
        if request.call is not None:
            request.call.cancel()
        limit_s = self._plan.load.request_timeout_s
        reason = f"no end within {limit_s} s" if status == _TIMED_OUT else status
        self._finish(request, status, reason, None)

    def _finish(self, request: Request, status: str, reason: str, ending: Ending | None) -> None:
        del self._open[request.row]
        request.call = None
        for timer in request.timers:
            timer.cancel()
        request.timers = ()
        self._ledger.add(request, status, reason, ending, self._clock())
        self._permits += request.permitted
        if self._held:
            asyncio.get_running_loop().call_soon(self._let_go)
        self._pacing.ended(request.row)
        if not self._open:
            self._drained.set()
        self._have_chores()

    def _let_go(self) -> None:
        """Send what --max-concurrency held back, as far as it may go now."""
        while self._held and self._permits > 0:
            request, payload = self._held.popleft()
            if request.row in self._open:  # it may have ended while it waited
                self._begin(request, payload)

    def _have_chores(self) -> None:
        if not self._busy_with_chores:
            self._busy_with_chores = True
            asyncio.get_running_loop().call_soon(self._chores)

    def _chores(self) -> None:
        """One thing that can wait, if there is time for it before the next release."""
        loop, left_ns = asyncio.get_running_loop(), self._pacing.next_due_ns - self._clock()
        payloads, ledger = self._payloads, self._ledger
        to_encode = payloads.wants_more and not self._pacing.done.is_set()
        if to_encode and left_ns > 3 * payloads.cost_ns:
            payloads.encode_next()
        elif ledger and (left_ns > _WRITING_NS or len(ledger) > MOST_WAITING):
            ledger.write_next()
        elif to_encode or ledger:
            loop.call_later(_PAUSE_S, self._chores)
            return
        else:
            self._busy_with_chores = False
            return
        loop.call_soon(self._chores)

    async def _warm_up(self, number: int) -> None:
        """Ask until the server has loaded; raises Failure."""
        until_s = time.monotonic() + LOADING_S
        while True:
            try:
                return await self._ask(number)
            except Failure as failure:
                loading = str(failure).startswith(("UNAVAILABLE", "HTTP 503"))
                if not loading or time.monotonic() > until_s:
                    raise
            await asyncio.sleep(LOADING_TICK_S)

    async def _ask(self, number: int) -> None:
        row = number % len(self._trace)
        output_tokens = int(self._trace.output_tokens[row])
        payload = self._target.encode(self._prompts.warm_up(number), output_tokens)
        sink = Unmeasured()
        call = self._target.begin(payload, sink)
        try:
            await sink.done
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def _tick(self) -> None:
        """Notice when this loop is too busy to stamp what arrives on time."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._loop_lags_ms.append(max(0.0, time.monotonic() - due) * 1e3)
