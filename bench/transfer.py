"""KV from prefill to its owner: GB/s beside a memory copy, and what of it a request waits for.

    python bench/transfer.py [--quick]

Speed: two processes, one prompt's KV of a Llama-3-8B-like slice, pushed layer by layer in chunks of
512 tokens as prefill does, from contiguous local pages into contiguous ones and into scattered
ones. The copy beside it moves as many bytes once, on one thread; a push between two processes reads
and writes them in both. Overlap: a pool of one node; the transfer seconds left after a prompt's
last chunk was computed, to the seconds of computing.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
from harness.machine import copy_bandwidth
from harness.metrics import scrape
from harness.options import finish, parser, tries
from harness.pool import generate, pool, prompts
from harness.report import Row, Target, note

from tknp.cli.ports import free_ports
from tknp.config import KvTransfer
from tknp.errors import Unavailable
from tknp.kv.storage import KvStorage
from tknp.metrics.table import PREFILL_COMPUTE, TRANSFER
from tknp.model.config import ModelConfig
from tknp.model.shard import Shard
from tknp.rpc.channel import Server
from tknp.rpc.security import PLAINTEXT
from tknp.transfer import compatibility
from tknp.transfer.base import Sender
from tknp.transfer.factory import make_receiver, make_sender
from tknp.transfer.receiver import write
from tknp.transfer.windows import WriteWindows
from tknp.v1.attention_owner_pb2 import DESCRIPTOR, OwnerDescription
from tknp.v1.attention_owner_pb2_grpc import (
    AttentionOwnerServicer,
    add_AttentionOwnerServicer_to_server,
)
from tknp.v1.common_pb2 import Placement, RequestKey

MODEL = ModelConfig(
    vocab_size=64, hidden_size=4096, intermediate_size=64, layers=16, q_heads=32, kv_heads=8,
    head_dim=128, max_position=8192,
)  # fmt: skip
PAGE_TOKENS, CHUNK_TOKENS = 64, 512
SERVICE = DESCRIPTOR.services_by_name["AttentionOwner"].full_name
KEY, WRITER = RequestKey(request_id="bench", attempt=0), "bench"
KINDS: tuple[KvTransfer, ...] = ("nixl", "grpc")
CONTEXT = 2048
SAME = compatibility.build(MODEL, model="bench", dtype="bfloat16", page_size=PAGE_TOKENS)


def storage(tokens: int) -> KvStorage:
    pages = 1 + tokens // PAGE_TOKENS
    heads = MODEL.kv_heads, PAGE_TOKENS, MODEL.head_dim
    return KvStorage(MODEL.layers, pages, *heads, torch.bfloat16)


class Owner(AttentionOwnerServicer):
    """As much of an attention owner as a sender needs: its memory, open for `WRITER`."""

    def __init__(self, kind: KvTransfer, tokens: int) -> None:
        self._storage = storage(tokens)
        windows = WriteWindows()
        windows.open(KEY, WRITER, range(self._storage.shape[2]))
        layers, heads = range(MODEL.layers), range(MODEL.kv_heads)
        self._receiver = make_receiver(kind, self._storage, layers, heads, windows)

    async def Describe(self, request: Any, context: Any) -> OwnerDescription:
        return OwnerDescription(
            compatibility=SAME, head_stop=MODEL.kv_heads, pages=self._storage.shape[2],
            kv_bytes=self._storage.nbytes, nixl_metadata=self._receiver.nixl_metadata,
            nixl_address=self._receiver.nixl_address,
        )  # fmt: skip

    async def Write(self, frames: Any, context: Any) -> Any:
        return await write(self._receiver, frames)


async def own(kind: KvTransfer, address: str, tokens: int) -> None:
    """Serve an owner until standard input ends."""
    server = Server(address, [SERVICE], PLAINTEXT)
    service = Owner(kind, tokens)  # type: ignore[abstract]  # a sender calls no more of it
    add_AttentionOwnerServicer_to_server(service, server.grpc)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop()


@asynccontextmanager
async def owner(kind: KvTransfer, tokens: int) -> AsyncIterator[str]:
    """The address of an owner in a process of its own. Unavailable if it can't serve `kind`."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--own", kind, address, str(tokens),
        stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
    )  # fmt: skip
    try:
        if process.stdout is None or not await process.stdout.readline():
            raise Unavailable(f"no owner serves {kind} here")
        yield address
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def push_s(sender: Sender, address: str, tokens: int, pages: Sequence[int]) -> float:
    """Seconds until `tokens` tokens of KV are in the owner's `pages`."""
    local = range(1, 1 + tokens // PAGE_TOKENS)
    place = Placement(
        layer_stop=MODEL.layers, head_stop=MODEL.kv_heads, token_stop=tokens, pages=pages
    )
    push = await sender.open(KEY, 1, WRITER, [place], [address], list(local))

    def chunks() -> None:
        for start in range(0, tokens, CHUNK_TOKENS):
            for layer in range(MODEL.layers):
                push.push(layer, start, start + CHUNK_TOKENS)

    began = time.perf_counter()
    await asyncio.to_thread(chunks)
    await push.finish()
    return time.perf_counter() - began


async def speeds(kind: KvTransfer, tokens: int, count: int) -> list[Row]:
    held = storage(tokens)
    held.data.view(torch.uint8).random_()
    nbytes = held.nbytes - held.page_bytes
    contiguous = list(range(1, 1 + tokens // PAGE_TOKENS))
    scattered = random.Random(0).sample(contiguous, len(contiguous))
    sender = make_sender(kind, held, Shard(MODEL, 0, MODEL.layers, True, True), SAME)
    rows = []
    try:
        async with owner(kind, tokens) as address:
            for name, pages in (("contiguous", contiguous), ("scattered", scattered)):
                await push_s(sender, address, tokens, pages)
                seconds = [await push_s(sender, address, tokens, pages) for _ in range(count)]
                speed = nbytes / statistics.median(seconds) / 1e9
                copy = copy_bandwidth(nbytes)
                rows.append(
                    Row(f"{kind}: {nbytes >> 20} MiB into {name} pages", speed, "GB/s", copy)
                )
                note(f"  {rows[-1].name}: {speed:.2f} GB/s, copy {copy:.2f}")
    finally:
        await sender.close()
    return rows


async def overlap(threads: int, count: int) -> list[Row]:
    rows = []
    for kind in KINDS:
        settings = {"kv_transfer": kind}
        async with pool(threads, kv_memory_bytes=256 << 20, settings=settings) as (up, client):
            (prompt,) = prompts(1, CONTEXT)
            await generate(client, prompt, 2)
            before = await scrape(up.pool)
            for _ in range(count):
                await generate(client, prompt, 2)
            after = await scrape(up.pool)
        left, computed = (
            (after.total(metric, "_sum") - before.total(metric, "_sum")) / count
            for metric in (TRANSFER, PREFILL_COMPUTE)
        )
        name = f"{kind}: transfer left after the last chunk of {CONTEXT} tokens"
        rows.append(
            Row(f"{name}, to computing them", left * 1e3, "ms", computed * 1e3,
                Target("ratio", most=0.05))
        )  # fmt: skip
        note(f"  {name}: {left * 1e3:.1f} ms of {computed * 1e3:.0f} ms")
    return rows


async def run(options: argparse.Namespace) -> list[Row]:
    tokens, count = 1024 if options.quick else 4096, tries(options, 5)
    rows = []
    for kind in KINDS:
        try:
            rows += await speeds(kind, tokens, count)
        except Unavailable as error:
            note(f"{kind} is left out: {error}")
    return rows + await overlap(options.threads, count)


def main() -> None:
    if sys.argv[1:2] == ["--own"]:
        kind, address, tokens = sys.argv[2:]
        asyncio.run(own(next(k for k in KINDS if k == kind), address, int(tokens)))
        return
    options = parser(__doc__).parse_args()
    finish("KV transfer", asyncio.run(run(options)), options)


if __name__ == "__main__":
    main()
