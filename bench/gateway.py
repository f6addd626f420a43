"""What the gateway adds to a chunk and to the first one, beside the coordinator's own stream.

    python bench/gateway.py                     64 streams of 20 tokens/s, 300 of 1 token/s
    python bench/gateway.py --quick --json

The pool is a process without a model that stamps every token with the time it is sent; this process
reads streams and subtracts. `direct` is gRPC to the pool, `serve` HTTP through Ray Serve's proxy
and a replica. Added latency is the difference of the two at the same quantile, and TTFT counts from
the request. All processes share this machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness.options import finish, parser
from harness.report import Row, Target, note

from tknp.cli.ports import free_ports
from tknp.cli.processes import Command, Supervisor
from tknp.client import Client, request_for
from tknp.v1.common_pb2 import Sampling

STAMPED = Path(__file__).parent / "harness" / "stamped_pool.py"
SECONDS, QUICK_SECONDS = 20, 4
MANY = 300


@dataclass
class Seen:
    """Of streams: milliseconds from sent to read of later chunks, from request to the first."""

    chunk_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    ended: int = 0

    def chunk(self, text: str, began: float) -> None:
        now = time.monotonic_ns()
        stamps = [int(stamp) for stamp in text.split()]
        if not stamps:
            return
        if self.tokens == 0:
            self.first_ms.append(now / 1e6 - began * 1e3)
        else:
            self.chunk_ms += [(now - stamp) / 1e6 for stamp in stamps]
        self.tokens += len(stamps)


def at(values: list[float], share: float) -> float:
    """The value below which `share` of `values` lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def direct(port: int, tokens: int, seen: Seen) -> None:
    """One stream from the pool itself."""
    async with Client(f"127.0.0.1:{port}") as client:
        began = time.monotonic()
        async for response in client.generate(request_for([1], Sampling(max_tokens=tokens))):
            seen.chunk(response.text, began)
            seen.ended += response.HasField("finish")


async def through(port: int, tokens: int, seen: Seen) -> None:
    """One stream of server-sent events, read with nothing but a socket."""
    body = json.dumps(
        {"model": "stamped", "prompt": [1], "max_tokens": tokens, "stream": True}
    ).encode()
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
        b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            choices = json.loads(line[6:]).get("choices", ())
            seen.chunk("".join(choice["text"] for choice in choices), began)
        seen.ended += line.startswith(b"data: [DONE]")
    writer.close()


Reader = Callable[[int, int, Seen], Coroutine[None, None, None]]


async def measure(read: Reader, port: int, streams: int, tokens: int) -> Seen:
    """`streams` at once, begun over one second."""

    async def one(number: int) -> Seen:
        await asyncio.sleep(number / streams)
        seen = Seen()
        await read(port, tokens, seen)
        return seen

    found = Seen()
    for seen in await asyncio.gather(*(one(number) for number in range(streams))):
        found.chunk_ms += seen.chunk_ms
        found.first_ms += seen.first_ms
        found.tokens += seen.tokens
        found.ended += seen.ended
    return found


@asynccontextmanager
async def served(rate: float) -> AsyncIterator[tuple[int, int]]:
    """A pool of `rate` tokens/s a stream behind a gateway: their ports."""
    pool, http = free_ports(2)
    gateway = [
        sys.executable, "-m", "tknp.cli.main", "gateway", "--pool-target", f"127.0.0.1:{pool}",
        "--http-port", str(http), "--max-replicas", "1",
    ]  # fmt: skip
    async with Supervisor() as supervisor:
        await supervisor.start(
            Command("pool", [sys.executable, str(STAMPED), str(pool), str(rate)])
        )
        await supervisor.start(Command("gateway", gateway))
        await supervisor.guard(_answers(http))
        yield pool, http


async def _answers(port: int) -> None:
    while True:
        seen = Seen()
        try:
            await through(port, 1, seen)
        except OSError:
            await asyncio.sleep(0.2)
        if seen.ended:
            return


async def run(options: argparse.Namespace) -> list[Row]:
    seconds = QUICK_SECONDS if options.quick else SECONDS
    rows = []
    async with served(options.rate) as (pool, http):
        note(f"{options.streams} streams of {options.rate:g} tokens/s")
        tokens = int(seconds * options.rate)
        alone = await measure(direct, pool, options.streams, tokens)
        behind = await measure(through, http, options.streams, tokens)
        for name, share, most in (("p50", 0.5, 4.0), ("p99", 0.99, 25.0)):
            ours, peer = at(behind.chunk_ms, share), at(alone.chunk_ms, share)
            target = Target("ours", most=most)
            rows.append(Row(f"added to a chunk, {name}", ours - peer, "ms", None, target))
            rows.append(Row(f"chunk through serve / direct, {name}", ours, "ms", peer))
        added = at(behind.first_ms, 0.5) - at(alone.first_ms, 0.5)
        rows.append(Row("added to TTFT, p50", added, "ms", None, Target("ours", most=15.0)))
    async with served(1.0) as (_, http):
        note(f"{MANY} streams of 1 token/s")
        many = await measure(through, http, MANY, seconds)
        whole = Target("ours", least=float(MANY))
        rows.append(Row("streams that ended whole", float(many.ended), f"of {MANY}", None, whole))
        rows.append(Row("their chunks, p99", at(many.chunk_ms, 0.99), "ms"))
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--streams", type=int, default=64, metavar="N")
    options.add_argument("--rate", type=float, default=20.0, metavar="TOKENS_PER_SECOND")
    chosen = options.parse_args()
    finish("gateway", asyncio.run(run(chosen)), chosen)


if __name__ == "__main__":
    main()
