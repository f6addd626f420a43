"""What a gateway that nobody uses takes from the pool beside it.

    python bench/gateway_idle.py
    python bench/gateway_idle.py --quick --json

A pool of SmolLM2 decodes the same batch again and again: without a gateway, beside an idle one, and
without again, in turns. The ratio is that of the medians. Processor time of the gateway's processes
is their own count, over the turns in which they idle.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import psutil
from harness.options import finish, parser, tries
from harness.pool import decode, pool, prompts
from harness.report import Row, Target, note
from harness.served import gateway

from tknp.client import Client

BATCH, CONTEXT, TOKENS = 8, 64, 96
SETTLE_S = 8.0  # Ray's own start goes on for a while
LEAST = 0.97


def used_s(pids: set[int]) -> float:
    """Processor time of these processes and their children so far."""
    found = 0.0
    for process in psutil.process_iter(["pid"]):
        try:
            family = {process.pid, *(parent.pid for parent in process.parents())}
            if family & pids:
                times = process.cpu_times()
                found += times.user + times.system
        except psutil.Error:
            continue
    return found


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def turn(client: Client, batch: list[list[int]]) -> float:
    """Tokens/s of one batch."""
    return (await decode(client, batch, TOKENS)).tokens_per_s


async def run(options: argparse.Namespace) -> list[Row]:
    alone: list[float] = []
    beside: list[float] = []
    shares: list[float] = []
    batch = prompts(BATCH, CONTEXT)
    async with pool(options.threads, kv_memory_bytes=256 << 20, settings={}) as (up, client):
        await turn(client, batch)
        port = int(up.target.rpartition(":")[2])
        token = up.pool.api_token_file or up.pool.token_file
        flags = ["--token-file", token] if token else []
        for number in range(tries(options, 2)):
            note(f"turn {number + 1}: without, beside, without")
            alone.append(await turn(client, batch))
            others = children()
            async with gateway(port, model="smollm2", flags=flags):
                await asyncio.sleep(SETTLE_S)
                idle = children() - others
                before, began = used_s(idle), time.monotonic()
                beside.append(await turn(client, batch))
                shares.append((used_s(idle) - before) / (time.monotonic() - began))
            alone.append(await turn(client, batch))
    ours, peer = statistics.median(beside), statistics.median(alone)
    return [
        Row("decode beside an idle gateway", ours, "tokens/s", peer, Target("ratio", least=LEAST)),
        Row("slowest and fastest turn without", min(alone), "tokens/s", max(alone)),
        Row("cores that the idle gateway uses", statistics.median(shares), "cores"),
    ]  # fmt: skip


def main() -> None:
    chosen = parser(__doc__ or "").parse_args()
    finish("an idle gateway", asyncio.run(run(chosen)), chosen)


if __name__ == "__main__":
    main()
