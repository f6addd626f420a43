"""Processor time of a pool beside its kernels: of each process, a step and while nothing runs.

    python bench/overhead.py [--quick] [--shapes 512x1 512x32] [--interval 16]

`--interval`: tokens of a message.

Where all cores compute, whatever other threads take lengthens the step: threads share each matrix
evenly and wait for the one that was interrupted. One node of one rank serves a batch whose KV was
made up, so that prefill is idle. Threads are counted by the kernel (`schedstat`): of the node all
but those that compute, which are the ones that ran longest.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.options import finish, parser, shapes
from harness.pool import pool, prompts
from harness.report import Row, note

from tknp.client import Client, received_ids, request_for
from tknp.v1.common_pb2 import Sampling

SHAPES = ((512, 1), (512, 32))
IDLE_S = 10.0
SETTLE_S = 2.0
WARM_STEPS = 8
CLIENT = "client"

Thread = tuple[str, int]
"""Process by name, thread by number."""


@dataclass(frozen=True)
class Spent:
    """Milliseconds on a core, by thread."""

    ms: Mapping[Thread, float]

    @classmethod
    def now(cls, pids: Mapping[str, int]) -> Spent:
        ms = {}
        for name, pid in pids.items():
            for task in Path(f"/proc/{pid}/task").iterdir():
                try:
                    nanoseconds = int((task / "schedstat").read_text().split()[0])
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has just ended
                ms[name, int(task.name)] = nanoseconds / 1e6
        return cls(ms)

    def since(self, before: Spent, computing: int = 0) -> dict[str, float]:
        """By process; without the `computing` busiest threads of all."""
        spent = {key: ms - before.ms.get(key, 0.0) for key, ms in self.ms.items()}
        for key in sorted(spent, key=spent.__getitem__)[len(spent) - computing :]:
            del spent[key]
        processes: defaultdict[str, float] = defaultdict(float)
        for (name, _), ms in spent.items():
            processes[name] += ms
        return dict(processes)


async def steps_ms(
    client: Client,
    pids: Mapping[str, int],
    context: int,
    batch: int,
    steps: int,
    options: argparse.Namespace,
) -> dict[str, float]:
    """Milliseconds a step by process, of `steps` steps with `batch` requests."""
    counts = [0] * batch
    warm, measured = asyncio.Event(), asyncio.Event()

    async def follow(index: int, prompt: list[int]) -> None:
        sampling = Sampling(max_tokens=WARM_STEPS + steps + 8, ignore_eos=True)
        request = request_for(prompt, sampling)
        request.stream_interval = options.interval
        async for response in client.generate(request):
            counts[index] += len(received_ids(response.token_ids))
            if index == 0 and counts[0] >= WARM_STEPS:
                warm.set()
            if index == 0 and counts[0] >= WARM_STEPS + steps:
                measured.set()

    async with asyncio.TaskGroup() as group:
        for index, prompt in enumerate(prompts(batch, context)):
            group.create_task(follow(index, prompt))
        await warm.wait()
        first, before = counts[0], Spent.now(pids)
        await measured.wait()
        last, after = counts[0], Spent.now(pids)
    spent = after.since(before, computing=options.threads)
    return {name: ms / (last - first) for name, ms in spent.items()}


async def measure(context: int, batch: int, steps: int, options: argparse.Namespace) -> list[Row]:
    settings = {"hold_until": batch, "max_batch": max(batch, 2), "synthetic_kv": True}
    async with pool(options.threads, kv_memory_bytes=900 << 20, settings=settings) as (up, client):
        pids = {**up.pids, CLIENT: os.getpid()}
        await asyncio.sleep(SETTLE_S)
        before = Spent.now(pids)
        await asyncio.sleep(IDLE_S)
        idle = Spent.now(pids).since(before)
        busy = await steps_ms(client, pids, context, batch, steps, options)
    name = f"context {context}, batch {batch}"
    rows = [Row(f"{name}: {process}", ms, "ms a step") for process, ms in sorted(busy.items())]
    rows.append(Row(f"{name}: all", sum(busy.values()), "ms a step"))
    rows += [
        Row(f"nothing running: {process}", ms / (IDLE_S * 10), "% of a core")
        for process, ms in sorted(idle.items())
        if process != CLIENT
    ]
    note("  " + ", ".join(f"{row.name} {row.ours:.3g} {row.unit}" for row in rows))
    return rows


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--interval", type=int, default=1, metavar="N", help="tokens of a message")
    options = flags.parse_args()
    rows: list[Row] = []
    for context, batch in shapes(options, SHAPES):
        steps = 40 if options.quick else 200
        rows += asyncio.run(measure(context, batch, steps, options))
    finish("Processor time beside the kernels", rows, options)


if __name__ == "__main__":
    main()
