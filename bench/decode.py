"""Decode speed of a whole pool beside other engines on the same cores, in the same minutes.

    python bench/decode.py                                  all shapes, all peers that are found
    python bench/decode.py --quick --peers-python PYTHON    two shapes, one try
    python bench/decode.py --shapes 512x32                  one shape

One node of one rank serves SmolLM2 in bfloat16; client, coordinator, prefill and decode node are
processes of their own. The requests of a batch are prefilled, held until all are ready, and decode
together. No peer hands out tokens one by one while this measures it, so neither do we: clients take
INTERVAL at a time. A try measures the memory's bandwidth, then ours, then the bare kernels, then
each peer; results are medians over tries. harness/roof.py explains the roof.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict

import torch
from harness.machine import load_average
from harness.options import finish, parser, shapes, tries
from harness.peers import Peer, peers, speed_of
from harness.pool import decode, pool, prompts
from harness.report import Row, at_least, note
from harness.roof import Roof
from kernels import SMOLLM2_135M, Clock, Model

# (context, batch) -> at least so many times the best peer
SHAPES = {(512, 1): 1.2, (512, 8): 1.5, (512, 32): 1.4, (512, 64): 1.5, (4096, 8): 1.5}
QUICK = ((512, 1), (512, 8))
STEPS = 64
INTERVAL = 8
PEER_STEPS = {"transformers": 8}
OF_BARE, OF_ROOF = 0.85, 0.65
KV_BYTES = 1600 << 20


class Shape:
    """One row of the table: tries of everything at one context and batch."""

    def __init__(self, context: int, batch: int, steps: int) -> None:
        self.context, self.batch, self.steps = context, batch, steps
        self.speeds: defaultdict[str, list[float]] = defaultdict(list)
        self.name = f"decode, context {context}, batch {batch}"

    async def measure(self, count: int, threads: int, others: list[Peer]) -> None:
        settings = {"hold_until": self.batch, "max_batch": max(self.batch, 2)}
        batch = prompts(self.batch, self.context)
        async with pool(threads, kv_memory_bytes=KV_BYTES, settings=settings) as (_, client):
            for _ in range(count):
                roof = Roof.measure(threads)
                self._add("read bandwidth", roof.read_gb_per_s)
                # Token k of a request is fed at context + k - 1, so steps see half of them.
                middle = self.context + INTERVAL + self.steps / 2
                self._add("roof", roof.tokens_per_s(middle, self.batch))
                tokens = 1 + INTERVAL + self.steps
                decoded = await decode(client, batch, tokens, INTERVAL)
                self._add("ours", decoded.tokens_per_s)
                self._add("bare kernels", self._bare())
                for peer in others:
                    steps = PEER_STEPS.get(peer.name.split()[0], self.steps)
                    shape = self.context, self.batch
                    speed = await asyncio.to_thread(speed_of, peer, *shape, steps)
                    if speed is not None:
                        self._add(peer.name, speed.decode)

    def rows(self, least: float) -> list[Row]:
        median = {name: statistics.median(speeds) for name, speeds in self.speeds.items()}
        ours, bandwidth = median.pop("ours"), median.pop("read bandwidth")
        targets = {"roof": OF_ROOF, "bare kernels": OF_BARE}
        rows = [
            Row(f"{self.name}: {peer}", ours, "tokens/s", speed, at_least(targets.get(peer, least)))
            for peer, speed in median.items()
        ]
        return [*rows, Row(f"{self.name}: read bandwidth", bandwidth, "GB/s")]

    def _add(self, name: str, value: float) -> None:
        self.speeds[name].append(value)
        note(f"  {self.name}: {name} {value:,.1f} (load {load_average():.1f})")

    @torch.inference_mode()
    def _bare(self) -> float:
        """Tokens/s of steps on the kernels alone, without sampling, in this process."""
        last = self.context + self.steps
        model = Model(SMOLLM2_135M, (last + 64) * self.batch)
        seconds = []
        for context in range(self.context, last):
            clock = Clock()
            model.decode(context, self.batch, clock)
            seconds.append(sum(clock.spent.values()))
        return self.batch / statistics.median(seconds)


async def run(options: argparse.Namespace) -> list[Row]:
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    usual = QUICK if options.quick and options.shapes is None else SHAPES
    with peers(options) as others:
        for context, batch in shapes(options, usual):
            shape = Shape(context, batch, STEPS // 4 if options.quick else STEPS)
            await shape.measure(tries(options, 3), options.threads, others)
            rows += shape.rows(SHAPES[context, batch])
    return rows


def main() -> None:
    options = parser(__doc__).parse_args()
    finish("Decode", asyncio.run(run(options)), options)


if __name__ == "__main__":
    main()
