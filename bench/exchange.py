"""The data plane between two processes of this host: how long, what share of a step, how much.

    python bench/exchange.py [--quick]

Latency: a root and an owner exchange the rows of one layer of SmolLM2 and nothing else, thousands
of times. Of a batch of 32 rows half are the owner's, as in a balanced pool of two nodes. Share and
bytes come from a pool of two nodes that decodes 8 requests: what its ranks spent in exchanges, and
sent, against equation (3) of Decode Token Parallelism plus handoffs and ids.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from harness.metrics import scrape
from harness.options import finish, parser
from harness.pool import decode, pool, prompts
from harness.report import Row, Target, note

from tknp.cli.ports import free_ports
from tknp.config import DataPlane
from tknp.kernels.mailbox import choose_lanes
from tknp.layout.derive import derive
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import sent_bytes
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.metrics.table import EXCHANGE_BYTES, STEP, STEP_PART
from tknp.model.checkpoint import open_checkpoint
from tknp.model.shard import Shard
from tknp.transport.base import Transport
from tknp.transport.factory import join
from tknp.transport.lane import LaneFactory

WIRES: dict[str, tuple[DataPlane, Callable[[], LaneFactory] | None]] = {
    "shared memory": ("shared_memory", choose_lanes),
    "shared memory without a compiler": ("shared_memory", None),
    "gloo": ("distributed", None),
}
OURS, OTHERS = "shared memory", ("shared memory without a compiler", "gloo")
BATCHES = (8, 32, 128)
LATENCY_US, SHARE, OVERHEAD = 15.0, 0.02, 1.01
BATCH, CONTEXT = 8, 512
ROOT, OWNER = Rank(0, 0), Rank(1, 0)
TIMEOUT_S = 60.0


def connect(rank: Rank, wire: str, meeting: str) -> Transport:
    torch.set_num_threads(1)
    kind, choose = WIRES[wire]
    return join(
        rank, 2, 1, kind=kind, addresses=[meeting, meeting], meeting=meeting, epoch=1,
        timeout_s=TIMEOUT_S, device=torch.device("cpu"), choose_lanes=choose,
    )  # fmt: skip


def buffers(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """QKV and attention rows of one layer."""
    shard = Shard(open_checkpoint("smollm2").config, 0, 1, False, False)
    qkv = torch.ones(rows, shard.qkv_width, dtype=torch.bfloat16)
    return qkv, torch.ones(rows, shard.q_width, dtype=torch.bfloat16)


def own(wire: str, meeting: str, rows: int, layers: int) -> None:
    """The owner's side: takes QKV rows, gives attention rows back, at once."""
    transport = connect(OWNER, wire, meeting)
    qkv, attention = buffers(rows)
    for _ in range(layers):
        transport.post([], [(ROOT, qkv)], stream=0).wait()
        transport.post([(ROOT, attention)], [], stream=0).wait()
    transport.close()


def latency_us(wire: str, rows: int, layers: int) -> float:
    """Median microseconds of a scatter of `rows` rows and the gather of their outputs."""
    meeting = f"127.0.0.1:{free_ports(1)[0]}"
    owner = subprocess.Popen(
        [sys.executable, __file__, "--own", wire, meeting, str(rows), str(layers)]
    )
    transport = connect(ROOT, wire, meeting)
    qkv, attention = buffers(rows)
    seconds = []
    for _ in range(layers):
        began = time.perf_counter()
        sent = transport.post([(OWNER, qkv)], [], stream=0)
        transport.post([], [(OWNER, attention)], stream=0).wait()
        sent.wait()
        seconds.append(time.perf_counter() - began)
    owner.wait(TIMEOUT_S)
    transport.close()
    return statistics.median(seconds) * 1e6


def latencies(layers: int) -> list[Row]:
    rows = []
    for batch in BATCHES:
        us = {wire: latency_us(wire, batch // 2, layers) for wire in WIRES}
        note(
            f"  {batch} rows: " + ", ".join(f"{wire} {value:.1f} us" for wire, value in us.items())
        )
        for other in OTHERS:
            name = f"scatter and gather a layer, {batch} rows, half of them remote; peer: {other}"
            bounded = batch == 32 and other == OTHERS[0]
            target = Target("ours", most=LATENCY_US) if bounded else None
            rows.append(Row(name, us[OURS], "us", us[other], target))
    return rows


async def in_step(threads: int, steps: int) -> list[Row]:
    """Shares and bytes of a step of two nodes that share this machine."""
    each = max(1, threads // 2)
    settings = {"hold_until": BATCH, "max_batch": BATCH, "transport": "shared_memory"}
    async with pool(each, nodes=2, kv_memory_bytes=256 << 20, settings=settings) as (up, client):
        batch = prompts(BATCH, CONTEXT)
        await decode(client, batch, 4)
        before = await scrape(up.pool)
        decoded = await decode(client, batch, steps + 1)
        after = await scrape(up.pool)

    def spent(read: Callable[..., float], *given: object, **labels: str) -> float:
        return read(after, *given, **labels) - read(before, *given, **labels)

    total = type(before).total
    # A token less than asked for comes from a step: prefill draws the first.
    step_s = spent(total, STEP, "_sum", node="0") / steps
    busy = [spent(total, STEP_PART, node=n, part="exchange") / steps for n in ("0", "1")]
    sent = spent(total, EXCHANGE_BYTES, scope="cross_node") / steps
    note(f"  two nodes: steps of {step_s * 1e3:.2f} ms, {decoded.step_s * 1e3:.2f} at the client")
    return [
        Row("two nodes, batch 8: step", step_s * 1e3, "ms"),
        Row("two nodes, batch 8: share of a step in exchanges, busier node",
            max(busy) / step_s, "of 1", target=Target("ours", most=SHARE)),
        Row("two nodes, batch 8: bytes sent a step, to equation (3) plus handoffs and ids", sent,
            "bytes", expected_bytes(), Target("ratio", least=1.0, most=OVERHEAD)),
    ]  # fmt: skip


def expected_bytes() -> int:
    """What programs of both nodes send to each other in one step."""
    config = open_checkpoint("smollm2").config
    layout = make_layout(config, "bfloat16", 1, [NodeSpec(memory_bytes=0)] * 2)
    rows = (BATCH // 2, BATCH // 2)
    groups = [Group((node,), node, count) for node, count in enumerate(rows) if count]
    programs = (derive(layout, 0, groups, rank) for rank in layout.ranks())
    return sum(sent_bytes(program, cross_node=True) for program in programs)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--own", nargs=4, help=argparse.SUPPRESS)
    options: argparse.Namespace = arguments.parse_args()
    if options.own:  # this script's own second process
        wire, meeting, count, layers = options.own
        own(wire, meeting, int(count), int(layers))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = latencies(200 if options.quick else 5000)
    rows += asyncio.run(in_step(options.threads, 16 if options.quick else 128))
    finish("Data plane on one host", rows, options)


if __name__ == "__main__":
    main()
