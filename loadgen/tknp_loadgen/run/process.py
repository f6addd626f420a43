"""The worker process: `python -m tknp_loadgen.run.process`, driven over its standard streams.

in    the plan, one line of JSON
out   {"ready": true} once everything is prepared
in    {"release_ns": N}, of the monotonic clock that all processes of a host share
out   {"progress": {...}} four times a second
in    {"stop": "drain"} or {"stop": "interrupt"}; end of input interrupts
out   {"done": {...}}, or {"failed": reason, "exit": code} at any point
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tknp_loadgen import loops
from tknp_loadgen.errors import Exit, LoadError
from tknp_loadgen.run.plan import WorkerPlan
from tknp_loadgen.run.timer import make_timer
from tknp_loadgen.run.worker import Worker
from tknp_loadgen.target.base import Failure
from tknp_loadgen.target.factory import open_target
from tknp_loadgen.trace.format import read_trace

PROGRESS_S = 0.25
LINE_BYTES = 1 << 24


def say(**message: Any) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


async def _control(lines: asyncio.StreamReader, worker: Worker) -> None:
    """Obey until the input ends."""
    while line := await lines.readline():
        worker.stop(json.loads(line)["stop"] == "interrupt")
    worker.stop(interrupt=True)


async def _report(worker: Worker) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        say(progress=worker.progress())


async def _main() -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    plan = WorkerPlan.loads((await lines.readline()).decode())
    trace = read_trace(Path(plan.directory) / "trace.jsonl")
    clock = time.monotonic_ns
    target, timer = open_target(plan.target, clock), make_timer()
    try:
        worker = Worker(plan, trace, target, clock, timer)
        await worker.prepare()
        say(ready=True)
        line = await lines.readline()
        if not line:
            return
        release_ns = json.loads(line).get("release_ns")
        if release_ns is None:  # stopped before it began
            return
        helpers = [asyncio.create_task(_control(lines, worker)),
                   asyncio.create_task(_report(worker))]  # fmt: skip
        try:
            done = await worker.run(release_ns)
        finally:
            for helper in helpers:
                helper.cancel()
        say(progress=worker.progress(), done=done)
    finally:
        timer.close()
        await target.close()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal and `timeout` signal the group:
        signal.signal(number, signal.SIG_IGN)  # the supervisor decides what that means
    try:
        loops.run(_main())
    except LoadError as error:
        say(failed=str(error), exit=int(error.exit))
    except Failure as error:
        say(failed=f"the warm-up request failed: {error}", exit=int(Exit.FAILED))
    except TimeoutError:
        say(failed="the warm-up requests took too long", exit=int(Exit.FAILED))


if __name__ == "__main__":
    main()
