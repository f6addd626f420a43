"""Prefill speed of a whole pool beside other engines on the same cores, in the same minutes.

    python bench/prefill.py [--quick] [--peers-python PYTHON]

A lone request's prompt tokens over its TTFT at the client: coordinator, prefill, transfer of the KV
to the decode node and the way back of the first token are in it. A try measures ours, then each
peer; results are medians over tries, which are many, as the cores may slow down between the two.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict

from harness.machine import load_average
from harness.options import finish, parser, tries
from harness.peers import peers, speed_of
from harness.pool import generate, pool, prompts
from harness.report import Row, at_least, note

CONTEXTS = {512: 1.05, 2048: 1.05}  # -> at least so many times the best peer
KV_BYTES = 512 << 20


async def run(options: argparse.Namespace) -> list[Row]:
    speeds: defaultdict[tuple[int, str], list[float]] = defaultdict(list)

    def add(context: int, name: str, value: float) -> None:
        speeds[context, name].append(value)
        note(f"  prefill, {context} tokens: {name} {value:,.1f} (load {load_average():.1f})")

    with peers(options) as others:
        async with pool(options.threads, kv_memory_bytes=KV_BYTES, settings={}) as (_, client):
            for _ in range(tries(options, 15)):
                for context in CONTEXTS:
                    (prompt,) = prompts(1, context)
                    stream = await generate(client, prompt, 2)
                    add(context, "ours", context / stream.tokens_s[0])
                    for peer in others:
                        speed = await asyncio.to_thread(speed_of, peer, context, 1, 2)
                        if speed is not None:
                            add(context, peer.name, speed.prefill)
    median = {key: statistics.median(values) for key, values in speeds.items()}
    rows = []
    for context, least in CONTEXTS.items():
        ours = median[context, "ours"]
        name = f"prefill, {context} tokens"
        found = {n: speed for (c, n), speed in median.items() if c == context and n != "ours"}
        rows += [
            Row(f"{name}: {peer}", ours, "tokens/s", speed, at_least(least))
            for peer, speed in found.items()
        ] or [Row(name, ours, "tokens/s", target=at_least(least))]
    return rows


def main() -> None:
    options = parser(__doc__).parse_args()
    finish("Prefill", asyncio.run(run(options)), options)


if __name__ == "__main__":
    main()
