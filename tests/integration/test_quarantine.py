"""Late writes never touch a live page: a writer process is stopped in mid-push, and goes on later.

The owner is a real node with its port in this process; leases end on a clock that the test turns.
The writer is this file run as a process of its own. It pushes one request's pages over and over, a
number higher each round, and prints each round that the owner has in place.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from google.protobuf import json_format
from grpc import aio

from tknp.errors import ProtocolError
from tknp.kv.holding import Key
from tknp.kv.pages import PagePool
from tknp.kv.storage import KvStorage
from tknp.layout.prefill import replica_layout
from tknp.layout.rank import Rank
from tknp.node.server import NodeServer
from tknp.pool import Pool
from tknp.rpc.convert import key_to
from tknp.rpc.security import PLAINTEXT
from tknp.transfer.factory import make_sender
from tknp.transfer.nixl_agent import nixl_available
from tknp.v1.attention_owner_pb2 import ReleaseRequest, ReserveRequest, TransferRequest
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import Compatibility, DescribeRequest, Phase, Placement

PAGE = 16
TOKENS = 6 * PAGE
LEASE_S = 30.0
LIVE = 0.25  # what live pages hold; the writer's rounds are whole numbers
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
needs_nixl = pytest.mark.skipif(bool(nixl_available()), reason=str(nixl_available()))


class Clock:
    """Real time plus what the test adds to it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


class Owner:
    """One attention owner that serves, and a stub to it."""

    def __init__(self, pool: Pool, node: NodeServer, clock: Clock, channel: aio.Channel) -> None:
        self.pool = pool
        self.node = node
        self.clock = clock
        self.stub = AttentionOwnerStub(channel)
        self.address = pool.config.nodes[0].addresses[0]

    @property
    def books(self) -> PagePool:
        assert self.node.runtime.books is not None
        return self.node.runtime.books

    @property
    def data(self) -> torch.Tensor:
        """[pages, ...]"""
        assert self.node.runtime.storage is not None
        return self.node.runtime.storage.data.movedim(2, 0)

    async def reserve(self, key: Key, tokens: int) -> list[Placement]:
        message = ReserveRequest(key=key_to(key), epoch=1, tokens=tokens, lease_s=LEASE_S)
        return list((await self.stub.Reserve(message)).placements)

    async def live(self, key: Key, tokens: int) -> list[int]:
        """Pages of a request whose KV is in place and that runs."""
        (placement,) = await self.reserve(key, tokens)
        self.books.begin(key, "test")
        self.data[list(placement.pages)] = LIVE
        self.books.complete(key, "test")
        self.books.admit(key)
        return list(placement.pages)

    async def release(self, key: Key) -> Any:
        return await self.stub.Release(ReleaseRequest(key=key_to(key), epoch=1))

    async def until(self, **counts: int) -> None:
        """Wait until the owner reports these numbers of pages."""
        while True:
            reported = (await self.stub.Describe(DescribeRequest())).counts
            if all(getattr(reported, name) == count for name, count in counts.items()):
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def owner_of(pool: Pool) -> AsyncIterator[Owner]:
    clock = Clock()
    node = NodeServer(pool, Rank(0, 0), clock=clock, security=PLAINTEXT)
    await node.start()
    try:
        async with aio.insecure_channel(pool.config.nodes[0].addresses[0]) as channel:
            owner = Owner(pool, node, clock, channel)
            while node.runtime.life.phase != Phase.PHASE_WARMING:
                assert not node.runtime.life.error
                await asyncio.sleep(0.01)
            yield owner
    finally:
        await node.stop()


class Writer:
    """This file as a process."""

    def __init__(self, pool: Pool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self._send({"model": pool.config.model, "kind": pool.config.kv_transfer})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def begin(self, owner: Owner, key: Key, placements: list[Placement]) -> None:
        self._send(
            {
                "key": key,
                "owner": owner.address,
                "compatibility": json_format.MessageToDict(owner.pool.compatibility),
                "placements": [json_format.MessageToDict(p) for p in placements],
            }
        )

    async def line(self) -> str:
        assert self.process.stdout is not None
        line = await asyncio.to_thread(self.process.stdout.readline)
        assert line, "the writer process has ended"
        return line.strip()

    async def reach(self, number: float) -> None:
        """Wait until this round is in place."""
        while int(await self.line()) < number:
            continue

    async def freeze(self) -> None:
        """Stop it wherever it is."""
        self.process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitpid, self.process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """The current push ends with Abort."""
        self._send({})

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def tiny_pool(make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]) -> Any:
    """One node of 40 pages."""

    def make(kind: str) -> Pool:
        model = random_checkpoint()
        page_bytes = 2 * 3 * 2 * 16 * 4 * PAGE
        made: Pool = make_pool(
            model, nodes=1, page_size=PAGE, kv_memory_bytes=40 * page_bytes, kv_transfer=kind
        )
        return made

    return make


async def fill(owner: Owner) -> list[int]:
    """Let running requests have every page that is free."""
    pages: list[int] = []
    while owner.books.free_tokens:
        size = min(owner.books.free_tokens, TOKENS)
        pages += await owner.live(Key(f"live-{len(pages)}", 0), size)
    return pages


@needs_nixl
async def test_a_stopped_writer_that_goes_on_touches_no_live_page(tiny_pool: Any) -> None:
    pool = tiny_pool("nixl")
    writer = Writer(pool)
    try:
        async with owner_of(pool) as owner:
            victim = Key("victim", 0)
            placements = await owner.reserve(victim, TOKENS)
            taken = list(placements[0].pages)
            writer.begin(owner, victim, placements)
            await writer.reach(2)
            await writer.freeze()
            before = owner.data[taken].max().item()

            owner.clock.skipped_s += LEASE_S + 1
            await owner.until(quarantined=len(taken), receiving=0)
            live = await fill(owner)
            assert sorted(live + taken) == list(range(1, 40))
            with pytest.raises(aio.AioRpcError, match="6 quarantined") as full:
                await owner.reserve(Key("late", 0), 1)
            assert full.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

            writer.thaw()
            await writer.reach(before + 2)
            assert owner.data[taken].min() > before  # its writes did land
            assert torch.all(owner.data[live] == LIVE)
            await owner.until(quarantined=len(taken))

            writer.stop()
            await owner.until(quarantined=0, free=len(taken))

            again = Key("victim", 1)
            writer.begin(owner, again, await owner.reserve(again, TOKENS))
            await owner.until(receiving=len(taken))
            await writer.reach(owner.data[taken].max().item() + 2)
            await writer.freeze()
            assert (await owner.release(again)).quarantined == len(taken)
            writer.kill()  # dead for certain: its port is closed
            await owner.until(quarantined=0, free=len(taken))
            assert torch.all(owner.data[live] == LIVE)
            owner.books.check_integrity()
    finally:
        writer.kill()


@pytest.mark.full
async def test_kv_by_grpc_needs_no_quarantine_once_its_window_is_closed(tiny_pool: Any) -> None:
    pool = tiny_pool("grpc")
    writer = Writer(pool)
    try:
        async with owner_of(pool) as owner:
            victim = Key("victim", 0)
            placements = await owner.reserve(victim, TOKENS)
            writer.begin(owner, victim, placements)
            await writer.reach(2)
            await writer.freeze()

            owner.clock.skipped_s += LEASE_S + 1
            await owner.until(quarantined=0, receiving=0, free=39)
            live = await fill(owner)
            assert set(placements[0].pages) < set(live)

            writer.thaw()
            while "refused" not in await writer.line():
                continue
            assert torch.all(owner.data[live] == LIVE)
            owner.books.check_integrity()
    finally:
        writer.kill()


async def write_rounds() -> None:
    """The writer: push until told to stop, request after request."""
    from tknp.model.checkpoint import open_checkpoint

    async def told() -> Any:
        line = await asyncio.to_thread(sys.stdin.readline)
        return json.loads(line) if line else None

    setup = await told()
    config = open_checkpoint(setup["model"]).config
    shard = replica_layout(config, "float32", 1).shards(Rank(0, 0))[0]
    storage = KvStorage(config.layers, 8, len(shard.kv_heads), PAGE, config.head_dim, torch.float32)
    port = await asyncio.start_server(lambda _, stream: stream.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{port.sockets[0].getsockname()[1]}"
    number = 0
    while (order := await told()) is not None:
        compatibility = json_format.ParseDict(order["compatibility"], Compatibility())
        placements = [json_format.ParseDict(p, Placement()) for p in order["placements"]]
        sender = make_sender(setup["kind"], storage, shard, compatibility)
        stub = AttentionOwnerStub(aio.insecure_channel(order["owner"]))
        transfer = TransferRequest(
            key=key_to(Key(*order["key"])), epoch=1, writer="stopped", lease_s=LEASE_S,
            compatibility=compatibility, one_sided=setup["kind"] == "nixl",
            writer_addresses=[address],
        )  # fmt: skip
        await stub.Begin(transfer)
        stop = asyncio.create_task(told())
        while not stop.done():
            number += 1
            storage.data.fill_(number)
            push = await sender.open(
                transfer.key, 1, transfer.writer, placements, [order["owner"]], range(1, 7)
            )
            for layer in range(config.layers):
                await asyncio.to_thread(push.push, layer, 0, TOKENS)
            try:
                await push.finish()
            except ProtocolError as error:
                print("refused:", error, flush=True)
                return
            print(number, flush=True)
        await push.abort()
        await stub.Abort(transfer)


if __name__ == "__main__":
    asyncio.run(write_rounds())
