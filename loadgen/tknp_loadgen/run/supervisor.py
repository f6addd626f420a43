"""One run: worker processes started, released together, watched, and their records summed up.

    directory -> first scrape -> workers prepare -> release -> progress ... -> all done
    -> last scrape -> config.yaml, summary.json, summary.csv

The supervisor does everything that would disturb the pacing: drawing, scraping, deciding when to
stop. It speaks to workers in JSON lines (see `process`). Ctrl-C and SIGTERM interrupt open requests
and keep what was measured; a second one kills the workers.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tknp_loadgen.errors import Exit, InputError, LoadError, TargetError
from tknp_loadgen.measure.result import Result, read_result, write_summary
from tknp_loadgen.run.live import Silent, View
from tknp_loadgen.run.plan import WorkerPlan
from tknp_loadgen.run.process import LINE_BYTES
from tknp_loadgen.run.scrape import Scraper
from tknp_loadgen.run.settings import RunSettings
from tknp_loadgen.run.watch import Totals, Watch, total
from tknp_loadgen.trace.format import Trace

LEAD_S = 0.3  # from the last worker's readiness to release
RESULT_FILES = ("requests*.jsonl", "tokens*.bin", "server_metrics.jsonl", "summary.*", "report.*")


@dataclass(frozen=True)
class Outcome:
    """A run's result and what its exit code should be."""

    result: Result
    exit: Exit


class Interrupted(LoadError):
    """Stopped before anything was released."""

    exit = Exit.INTERRUPTED


async def supervise(trace: Trace, settings: RunSettings, view: View | None = None) -> Outcome:
    """Run `trace`; raises LoadError where it could not begin."""
    directory = settings.output
    prepare_directory(directory)
    trace.write(directory / "trace.jsonl")
    run = _Run(trace, settings, view or Silent())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, run.interrupt)
    try:
        scrapes = directory / "server_metrics.jsonl"
        async with Scraper(settings.metrics_urls, scrapes, settings.metrics_interval_s) as scraper:
            await run.prepare()
            await scraper.look()
            run.release()
            scraper.begin(run.release_ns)
            await run.finish()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        await run.kill()
    config = settings.config(trace) | {
        "released_at_unix_s": run.released_at_unix_s, "stopped": run.stopped, "workers": run.done,
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    result = read_result(directory)
    write_summary(result)
    return Outcome(result, exit_of(result.summary, settings, run.stopped))


def exit_of(summary: Mapping[str, Any], settings: RunSettings, stopped: str | None = None) -> Exit:
    """Errors before invalidity before the SLO, which counts only if it was asked for."""
    limit = settings.max_error_rate
    if stopped == "interrupted":
        return Exit.INTERRUPTED
    if stopped == "errors" or (limit is not None and summary["error_ratio"] > limit):
        return Exit.TOO_MANY_ERRORS
    if not summary["completed"] and summary["failed"]:
        return Exit.TOO_MANY_ERRORS
    if not summary["valid"]:
        return Exit.INVALID_RUN
    if settings.goodput and not summary["slo"]["met"]:
        return Exit.SLO_MISSED
    return Exit.GOOD


def prepare_directory(directory: Path) -> None:
    """Make it, or clear it of an earlier run's files; refuses a directory of something else."""
    if directory.exists() and any(directory.iterdir()) and not (directory / "trace.jsonl").exists():
        raise InputError("output", str(directory), "holds other files: name a new directory")
    directory.mkdir(parents=True, exist_ok=True)
    for pattern in RESULT_FILES:
        for path in directory.glob(pattern):
            path.unlink()


class _Run:
    """The workers of one run."""

    def __init__(self, trace: Trace, settings: RunSettings, view: View) -> None:
        self._trace, self._settings, self._view = trace, settings, view
        self._workers: list[asyncio.subprocess.Process] = []
        self._ready: list[asyncio.Event] = []
        self._progress: dict[int, Mapping[str, Any]] = {}
        self._readers: list[asyncio.Task[None]] = []
        saturation = settings.slo_target if settings.until_saturated else None
        self._watch = Watch(settings.max_error_rate, saturation)
        self.release_ns = 0
        self.released_at_unix_s = 0.0
        self.stopped: str | None = None
        self.done: list[Mapping[str, Any]] = []

    async def prepare(self) -> None:
        """Until every worker is ready."""
        count = self._settings.workers(self._trace)
        for number in range(count):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tknp_loadgen.run.process",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=LINE_BYTES,
            )  # fmt: skip
            self._workers.append(process)
            plan = WorkerPlan(
                number, count, str(self._settings.output.resolve()), self._settings.target,
                self._settings.load, self._settings.goodput,
            )  # fmt: skip
            self._tell(process, plan.dumps())
            ready = asyncio.Event()
            self._ready.append(ready)
            self._readers.append(asyncio.create_task(self._read(number, process, ready)))
        await self._all(asyncio.create_task(event.wait()) for event in self._ready)

    def release(self) -> None:
        """Tell all of them when to begin."""
        if self.stopped:
            raise Interrupted("interrupted before anything was sent")
        lead_s = self._lead_s()
        self.release_ns = time.monotonic_ns() + round(lead_s * 1e9)
        self.released_at_unix_s = time.time() + lead_s
        for process in self._workers:
            self._tell(process, json.dumps({"release_ns": self.release_ns}))

    async def finish(self) -> None:
        """Until every worker is done, and gone by itself."""
        await self._all(self._readers)
        await asyncio.gather(*(process.wait() for process in self._workers))

    def interrupt(self) -> None:
        if self.stopped == "interrupted":
            for process in self._workers:
                process.kill()
        self._stop("interrupted", "interrupt")
        for event in self._ready:  # those who wait for readiness find out why
            event.set()

    async def kill(self) -> None:
        """Leave no process behind."""
        for process in self._workers:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for reader in self._readers:
            reader.cancel()

    def _lead_s(self) -> float:
        if self._settings.start_at is None:
            return LEAD_S
        lead_s = self._settings.start_at - time.time()
        if lead_s < 0:
            raise InputError("start_at", self._settings.start_at, f"passed {-lead_s:.1f} s ago")
        return lead_s

    async def _all(self, waits: Any) -> None:
        """Wait for all of `waits`, or raise what ended a reader before."""
        waiting = set(waits)
        while waiting:
            done, _ = await asyncio.wait(
                waiting | set(self._readers), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                task.result()
            waiting -= done
            if all(reader.done() for reader in self._readers):
                return

    async def _read(
        self, number: int, process: asyncio.subprocess.Process, ready: asyncio.Event
    ) -> None:
        """One worker's words, to its end."""
        if process.stdout is None:
            raise RuntimeError("the worker has no output")
        finished = False
        while line := await process.stdout.readline():
            message = json.loads(line)
            if "failed" in message:
                error = TargetError(message["failed"])
                error.exit = Exit(message["exit"])
                raise error
            if "ready" in message:
                ready.set()
            if "progress" in message:
                self._progress[number] = message["progress"]
                self._look()
            if "done" in message:
                self.done.append(message["done"])
                finished = True
        if not finished and self.stopped != "interrupted":
            raise TargetError(f"worker {number} died with code {await process.wait()}")

    def _look(self) -> None:
        totals: Totals = total(list(self._progress.values()))
        self._view.show(totals, (time.monotonic_ns() - self.release_ns) / 1e9)
        reason = self._watch.look(totals)
        if reason is not None:
            self._stop(reason, "drain")

    def _stop(self, reason: str, how: str) -> None:
        if self.stopped:
            return
        self.stopped = reason
        for process in self._workers:
            self._tell(process, json.dumps({"stop": how}))

    @staticmethod
    def _tell(process: asyncio.subprocess.Process, line: str) -> None:
        if process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(line.encode() + b"\n")
