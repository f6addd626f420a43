"""The data plane between two processes of this host: how long, what share of a step, how much.

    python bench/exchange.py [--quick]

Latency: a root and an owner exchange the rows of one layer of SmolLM2 and nothing else, thousands
of times, as the engine does: compiled lanes move them within a run of layers, whose computing is
left out here, other wires operation by operation. Of a batch of 32 rows half are the owner's, as in
a balanced pool of two nodes. Share and bytes come from a pool of two nodes that decodes 8 requests:
what its ranks spent in exchanges, and sent, headers of messages included, against equation (3) of
Decode Token Parallelism plus handoffs and ids.
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
from harness.layers import run_through
from harness.metrics import scrape
from harness.options import finish, parser
from harness.pool import decode, pool, prompts
from harness.report import Row, Target, note

from tknp.cli.ports import free_ports
from tknp.config import DataPlane
from tknp.kernels.exchange import Mailbox
from tknp.kernels.layers import KernelLayers
from tknp.kernels.mailbox import choose_lanes
from tknp.layout.derive import derive
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Transfer, sent_bytes
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
RUN = 20  # layers in one go
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


def scatter_and_gather(rank: Rank, rows: int) -> list[Op]:
    """What `rank` exchanges in one layer of SmolLM2."""
    heads = heads_of_smollm2()
    qkv = (Transfer(ROOT, OWNER, 0, rows, heads.qkv_width, 2, "qkv"),)
    attention = (Transfer(OWNER, ROOT, 0, rows, heads.q_width, 2, "attention"),)
    if rank == ROOT:
        return [Op(Kind.SCATTER, 0, rows, 0, sends=qkv), Op(Kind.GATHER, 0, rows, 0, (), attention)]
    return [Op(Kind.SCATTER, 0, rows, 0, recvs=qkv), Op(Kind.GATHER, 0, rows, 0, sends=attention)]


def heads_of_smollm2() -> Shard:
    return Shard(open_checkpoint("smollm2").config, 0, 1, False, False)


def exchange(transport: Transport, rows: int, layers: int) -> list[float]:
    """Seconds of each layer at one rank."""
    heads, ops = heads_of_smollm2(), scatter_and_gather(transport.rank, rows)
    mailbox = Mailbox.of(transport, 0)
    if mailbox is not None:
        whole = KernelLayers(heads, (), None, {}, max_rows=rows, mailbox=mailbox)
        prepared = whole.prepare(range(RUN), ops)
        seconds: list[float] = []
        for _ in range(layers // RUN):
            seconds += run_through(whole.run(prepared, None, torch.empty(0))).seconds
        return [sum(layer) for layer in zip(seconds[::2], seconds[1::2], strict=True)]
    place = {
        what: torch.ones(rows, width, dtype=torch.bfloat16)
        for what, width in (("qkv", heads.qkv_width), ("attention", heads.q_width))
    }
    sends = [[(t.dst, place[t.what]) for t in op.sends] for op in ops]
    recvs = [[(t.src, place[t.what]) for t in op.recvs] for op in ops]
    seconds, sent = [], None
    for _ in range(layers):
        began = time.perf_counter()
        for sending, receiving in zip(sends, recvs, strict=True):
            if sent is not None and sending:
                sent.wait()
            work = transport.post(sending, receiving, stream=0)
            if sending:
                sent = work
            else:
                work.wait()
        seconds.append(time.perf_counter() - began)
    if sent is not None:
        sent.wait()
    return seconds


def latency_us(wire: str, rows: int, layers: int) -> float:
    """Median microseconds of a scatter of `rows` rows and the gather of their outputs."""
    meeting = f"127.0.0.1:{free_ports(1)[0]}"
    owner = subprocess.Popen(
        [sys.executable, __file__, "--own", wire, meeting, str(rows), str(layers)]
    )
    transport = connect(ROOT, wire, meeting)
    seconds = exchange(transport, rows, layers)
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
    sent = sum(spent(total, EXCHANGE_BYTES, scope=s) for s in ("cross_node", "framing")) / steps
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
        transport = connect(OWNER, wire, meeting)
        exchange(transport, int(count), int(layers))
        transport.close()
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = latencies(200 if options.quick else 5000)
    rows += asyncio.run(in_step(options.threads, 16 if options.quick else 128))
    finish("Data plane on one host", rows, options)


if __name__ == "__main__":
    main()
