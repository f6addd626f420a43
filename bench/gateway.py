"""What a gateway adds to a chunk and to the first one, and what the coordinator's own port does.

    python bench/gateway.py                     64 streams of 20 tokens/s, each in its own time
    python bench/gateway.py --together          tokens of all streams at once, as a step has them
    python bench/gateway.py --crowds            300 and 2000 streams of 1 token/s
    python bench/gateway.py --quick --json

Behind the coordinator's port a clock puts tokens into queues where a pool would. `port` is gRPC to
it, `gateway` HTTP through `tknp gateway`; latency is from when a token is due to when this process
has read it, and what is added is the difference at the same quantile. TTFT counts from the request.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import AsyncExitStack

import psutil
from harness.options import finish, parser
from harness.report import Row, Target, note
from harness.served import Seen, at, direct, gateway, measure, over, stamped, through

from tknp.client import Client

SECONDS, QUICK_SECONDS = 8, 3
MANY, MOST, CONNECTIONS = 300, 2000, 20
LONG_TOKENS = 128 * 1024
STREAM_KIB = 60.0
WORDS = ("the", "river", "of", "thought", "engine", "paper", "quite", "London", "\n")


def latencies(name: str, seen: Seen, peer: Seen | None, most_ms: dict[float, float]) -> list[Row]:
    """Rows of `seen` at the quantiles of `most_ms`; beside `peer`, the bound is on the rest."""
    rows = []
    for share, most in most_ms.items():
        label, target = f"p{share * 100:g}", Target("ours", most=most)
        ours = seen.at_ms(share)
        if peer is None:
            rows.append(Row(f"a chunk, {name}, {label}", ours, "ms", None, target))
            continue
        added = ours - peer.at_ms(share)
        rows.append(Row(f"a chunk, {name}, {label}", ours, "ms", peer.at_ms(share)))
        rows.append(Row(f"added to a chunk, {label}", added, "ms", None, target))
    return rows


async def beside(rate: float, streams: int, seconds: int, together: bool) -> list[Row]:
    """The port alone, then the gateway before it, then a long prompt beside its streams."""
    tokens = int(seconds * rate)
    async with stamped(rate, together=together) as (pool, _), gateway(pool) as http:
        note(f"{streams} streams of {rate:g} tokens/s")
        alone = await measure([direct], pool, streams, tokens)
        rows = latencies("port", alone, None, {0.5: 1.0, 0.99: 5.0})
        behind = await measure([through], http, streams, tokens)
        rows += latencies("gateway / port", behind, alone, {0.5: 4.0, 0.99: 25.0})
        added = at(behind.first_ms, 0.5) - at(alone.first_ms, 0.5)
        rows.append(Row("added to TTFT, p50", added, "ms", None, Target("ours", most=15.0)))
        note(f"the same, and prompts of {LONG_TOKENS} tokens")
        running = asyncio.create_task(measure([through], http, streams, tokens))
        source, long = random.Random(0), Seen()
        while not running.done():
            text = " ".join(source.choice(WORDS) for _ in range(LONG_TOKENS))
            await through(http, 1, long, text)
        held = await running
    rows.append(Row("long prompts answered meanwhile", float(long.ended), "prompts"))
    rows.append(Row("TTFT of a long prompt, p50", at(long.first_ms, 0.5), "ms"))
    limit = Target("ours", most=250.0)
    rows.append(Row("a chunk beside them, p99", held.at_ms(0.99), "ms", behind.at_ms(0.99)))
    rows.append(Row("a chunk beside them, worst", max(held.chunk_ms), "ms", None, limit))
    return rows


async def crowds(seconds: int) -> list[Row]:
    """Many slow streams: through the gateway, and on the port, where memory is counted too."""
    async with stamped(1.0) as (pool, pid):
        async with gateway(pool) as http:
            note(f"{MANY} streams of 1 token/s through the gateway")
            some = await measure([through], http, MANY, seconds)
        note(f"{MOST} streams of 1 token/s over {CONNECTIONS} connections to the port")
        process = psutil.Process(pid)
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Client(f"127.0.0.1:{pool}"))
                for _ in range(CONNECTIONS)
            ]
            before = process.memory_info().rss
            running = asyncio.create_task(
                measure([over(client) for client in clients], pool, MOST, seconds)
            )
            most = before
            while not running.done():
                await asyncio.wait([running], timeout=0.5)
                most = max(most, process.memory_info().rss)
            found = await running
    whole, all_of_them = Target("ours", least=float(MANY)), Target("ours", least=float(MOST))
    kib = (most - before) / 1024 / MOST
    return [
        Row("gateway: streams that ended whole", float(some.ended), f"of {MANY}", None, whole),
        Row("gateway: their chunks, p99", some.at_ms(0.99), "ms"),
        Row("port: streams that ended whole", float(found.ended), f"of {MOST}", None, all_of_them),
        Row("port: their chunks, p50", found.at_ms(0.5), "ms"),
        Row("port: their chunks, p99", found.at_ms(0.99), "ms"),
        Row("port: memory a stream", kib, "KiB", None, Target("ours", most=STREAM_KIB)),
    ]  # fmt: skip


async def run(options: argparse.Namespace) -> list[Row]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    if options.crowds:
        return await crowds(seconds)
    return await beside(options.rate, options.streams, seconds, options.together)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--streams", type=int, default=64, metavar="N")
    options.add_argument("--rate", type=float, default=20.0, metavar="TOKENS_PER_SECOND")
    options.add_argument("--together", action="store_true", help="tokens of all streams at once")
    options.add_argument("--crowds", action="store_true", help="300 and 2000 streams of 1 token/s")
    chosen = options.parse_args()
    finish("gateway", asyncio.run(run(chosen)), chosen)


if __name__ == "__main__":
    main()
