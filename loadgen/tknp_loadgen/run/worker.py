"""One worker: sends its rows on time and writes down what comes back.

    connect -> warm up with other prompts -> encode ahead -> freeze GC -> ready
    -> release every row at its absolute deadline -> drain -> close

Deadlines are absolute, on the clock that stamps tokens, and set once: a late release makes no later
one late, nothing is dropped, nothing is put off. Each request is a task of its own, so that a slow
one holds up nobody. In a closed loop a user's next request is due when the last answer has come and
the pause has passed.

Stopping (Ctrl-C, saturation, too many errors) releases nothing more; what is open then drains, or
is interrupted.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tknp_loadgen.measure.slo import DEFAULT, Slo, request_values_ms
from tknp_loadgen.run.payloads import Payloads
from tknp_loadgen.run.plan import WorkerPlan
from tknp_loadgen.run.records import Files, Request
from tknp_loadgen.run.timer import Timer
from tknp_loadgen.target.base import Clock, Ending, Failure, Target
from tknp_loadgen.trace.format import MICRO, Trace
from tknp_loadgen.trace.prompts import Prompts

TICK_S = 0.02
WARM_UP_TIMEOUT_S = 600.0
RECENT = 512
_TIMED_OUT, _CANCELLED, _INTERRUPTED = "timeout", "cancelled", "interrupted"


class Worker:
    """Runs one plan once: `prepare`, then `run` from the moment of release."""

    def __init__(
        self, plan: WorkerPlan, trace: Trace, target: Target, clock: Clock, timer: Timer
    ) -> None:
        self._plan, self._trace, self._target = plan, trace, target
        self._clock, self._timer = clock, timer
        load = plan.load
        self._rows = load.rows(trace, plan.worker, plan.workers)
        text_file = Path(load.text_file) if load.text_file else None
        self._prompts = Prompts(trace, text_file)
        outputs = trace.output_tokens.tolist()
        self._payloads = Payloads(self._rows, outputs, self._prompts, target, clock)
        self._files = Files(Path(plan.directory), plan.worker)
        self._cancelled_rows = load.cancelled(trace)
        self._slo = Slo.parse(plan.slo or DEFAULT)
        self._permits = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
        self._release_ns = 0
        self._stopping = asyncio.Event()
        self._open: dict[int, tuple[Request, asyncio.Task[None]]] = {}
        self._reasons: dict[int, str] = {}
        self._statuses: dict[str, int] = {}
        self._good = self._released = self._tokens = 0
        self._recent: dict[str, deque[float]] = {
            name: deque(maxlen=RECENT) for name in ("lag_ms", "ttft_ms", "tpot_ms")
        }
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
        """Send everything; returns what the client itself looked like meanwhile."""
        self._release_ns = release_ns
        gc.disable()
        cpu_s, began_ns = time.process_time(), self._clock()
        ticker = asyncio.create_task(self._tick())
        try:
            await (self._closed_loop() if self._trace.users else self._open_loop())
            while self._open:
                await asyncio.wait([task for _, task in self._open.values()])
        finally:
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
            "max_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }  # fmt: skip

    def stop(self, interrupt: bool) -> None:
        """Release nothing more; `interrupt` also ends what is open."""
        self._stopping.set()
        if interrupt:
            for row, (_, task) in self._open.items():
                self._reasons.setdefault(row, _INTERRUPTED)
                task.cancel()

    def progress(self) -> Mapping[str, Any]:
        """Cumulative counts, and medians of recent requests."""
        now_ns = self._clock()
        overdue = sum(
            1 for request, _ in self._open.values()
            if (now_ns - request.scheduled_ns) / 1e6 / request.wanted_tokens
            > self._slo.bounds.get("ntpot", float("inf"))
        )  # fmt: skip
        return {
            "released": self._released, "open": len(self._open), "statuses": self._statuses,
            "good": self._good, "overdue": overdue, "tokens": self._tokens,
            **{name: _median(values) for name, values in self._recent.items()},
        }  # fmt: skip

    async def _open_loop(self) -> None:
        arrivals = self._trace.arrival_us
        for row in self._rows:
            deadline_ns = self._release_ns + int(arrivals[row]) * 1000
            while self._payloads.wants_more and self._idle_until(deadline_ns):
                self._payloads.encode_next()
                await asyncio.sleep(0)
            if not await self._wait(deadline_ns):
                return
            self._release(row, deadline_ns)

    async def _closed_loop(self) -> None:
        users: dict[int, list[int]] = {}
        for row in self._rows:
            users.setdefault(self._trace.extra(row)["user"], []).append(row)
        await asyncio.gather(*(self._user(rows) for rows in users.values()))

    async def _user(self, rows: list[int]) -> None:
        due_ns = self._release_ns
        for row in rows:
            due_ns += round(self._trace.extra(row)["think_s"] * MICRO) * 1000
            if not await self._wait(due_ns):
                return
            await asyncio.wait([self._release(row, due_ns)])
            due_ns = self._clock()

    def _idle_until(self, deadline_ns: int) -> bool:
        return deadline_ns - self._clock() > 3 * self._payloads.cost_ns

    async def _wait(self, deadline_ns: int) -> bool:
        """False where the run stops first."""
        if self._stopping.is_set():
            return False
        if deadline_ns - self._clock() > 200_000_000:  # far enough to be worth two tasks
            stop = asyncio.ensure_future(self._stopping.wait())
            wake = asyncio.ensure_future(self._timer.until(deadline_ns))
            await asyncio.wait((stop, wake), return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            wake.cancel()
        else:
            await self._timer.until(deadline_ns)
        return not self._stopping.is_set()

    def _release(self, row: int, due_ns: int) -> asyncio.Task[None]:
        payload, answer = self._payloads.take(row)
        request = Request(
            row, due_ns, self._release_ns, int(self._trace.output_tokens[row]), self._clock,
            self._files, answer,
        )  # fmt: skip
        task = asyncio.get_running_loop().create_task(self._one(request, payload))
        self._open[row] = request, task
        task.add_done_callback(lambda _: self._never_began(request))
        self._released += 1
        return task

    def _never_began(self, request: Request) -> None:
        """A task that is cancelled before its first step runs none of its own code."""
        if self._open.get(request.row, (None,))[0] is request:
            self._finish(request, _INTERRUPTED, _INTERRUPTED, Ending())

    async def _one(self, request: Request, payload: bytes) -> None:
        loop, load, row = asyncio.get_running_loop(), self._plan.load, request.row
        timers = []
        if load.request_timeout_s is not None:
            left_s = load.request_timeout_s - (self._clock() - request.scheduled_ns) / 1e9
            timers.append(loop.call_later(left_s, self._end, row, _TIMED_OUT))
        if row in self._cancelled_rows:
            timers.append(loop.call_later(load.cancel_after_s, self._end, row, _CANCELLED))
        ending = Ending()
        try:
            ending = await self._permitted(request, payload)
            status, reason = request.verdict(ending, load.any_length)
        except Failure as failure:
            status, reason = "error", str(failure)
        except asyncio.CancelledError:
            status = self._reasons.pop(row, _INTERRUPTED)
            reason = f"no end within {load.request_timeout_s} s" if status == _TIMED_OUT else status
        except Exception as error:  # a defect here must not pass for a good answer
            status, reason = "error", f"{type(error).__name__}: {error}"
        for timer in timers:
            timer.cancel()
        self._finish(request, status, reason, ending)

    async def _permitted(self, request: Request, payload: bytes) -> Ending:
        if self._permits is None:
            return await self._target.send(payload, request)
        async with self._permits:
            request.permitted_ns = self._clock()
            return await self._target.send(payload, request)

    def _end(self, row: int, status: str) -> None:
        self._reasons[row] = status
        self._open[row][1].cancel()

    def _finish(self, request: Request, status: str, reason: str, ending: Ending) -> None:
        del self._open[request.row]
        record = request.record(status, reason, ending, self._clock())
        self._files.request(record)
        self._statuses[status] = self._statuses.get(status, 0) + 1
        self._tokens += request.counted
        if request.released_ns:
            self._recent["lag_ms"].append(request.lag_ns / 1e6)
        if status != "ok":
            return
        values = request_values_ms(
            record["scheduled_s"], record["first_token_s"], record["last_token_s"],
            record["completion_tokens"], request.first_tokens, record["max_gap_s"],
        )  # fmt: skip
        self._good += self._slo.good(values)
        for name, key in (("ttft_ms", "ttft"), ("tpot_ms", "tpot")):
            value = values[key]
            if value is not None:
                self._recent[name].append(value)

    async def _warm_up(self, number: int) -> None:
        row = number % len(self._trace)
        output_tokens = int(self._trace.output_tokens[row])
        payload = self._target.encode(self._prompts.warm_up(number), output_tokens)
        await self._target.send(payload, _Unmeasured())

    async def _tick(self) -> None:
        """Notice when this loop is too busy to stamp what arrives on time."""
        while True:
            due = time.monotonic() + TICK_S
            await asyncio.sleep(TICK_S)
            self._loop_lags_ms.append(max(0.0, time.monotonic() - due) * 1e3)


class _Unmeasured:
    """A Sink for warm-up."""

    def released(self) -> None: ...
    def retried(self) -> None: ...
    def tokens(self, count: int, at_ns: int) -> None: ...
    def text(self, piece: str) -> None: ...


def _median(values: deque[float]) -> float | None:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None
