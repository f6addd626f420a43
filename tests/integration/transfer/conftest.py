"""Owners and prefill ranks that move KV over real connections.

Owners are gRPC servers on loopback with real NIXL agents: in this process, or, where one has to be
killed or frozen, this file run as a process of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from grpc import aio

from tknp.kv.storage import KvStorage
from tknp.model.config import ModelConfig
from tknp.model.shard import Shard
from tknp.rpc.status import ErrorInterceptor
from tknp.transfer import compatibility
from tknp.transfer.base import Kind, Push, Sender
from tknp.transfer.factory import make_receiver, make_sender
from tknp.transfer.nixl_agent import nixl_available
from tknp.transfer.receiver import Receiver, write
from tknp.transfer.windows import WriteWindows
from tknp.v1.attention_owner_pb2 import OwnerDescription
from tknp.v1.attention_owner_pb2_grpc import (
    AttentionOwnerServicer,
    add_AttentionOwnerServicer_to_server,
)
from tknp.v1.common_pb2 import Placement, RequestKey

PAGE = 4
HEAD_DIM = 64
POOL_PAGES = 12
LAYERS = 3
TOKENS = 21
CHUNKS = ((0, 6), (6, 13), (13, TOKENS))
KEY = RequestKey(request_id="r", attempt=1)
WRITER = "prefill-0"
EPOCH = 7
POISON = 0xA5
TIMEOUT_S = 10.0


def model(kv_heads: int) -> ModelConfig:
    return ModelConfig(32, 48, 48, LAYERS, kv_heads * 4, kv_heads, HEAD_DIM, 512)


def shard(kv_heads: int, tp: int, rank: int) -> Shard:
    return Shard(model(kv_heads), 0, LAYERS, True, True, tp, rank)


def pool(heads: int, dtype: torch.dtype, pages: int = POOL_PAGES) -> KvStorage:
    storage = KvStorage(LAYERS, pages, heads, PAGE, HEAD_DIM, dtype)
    raw(storage).fill_(POISON)
    return storage


def raw(storage: KvStorage) -> torch.Tensor:
    return storage.data.view(torch.uint8)


def fits(kv_heads: int, dtype: torch.dtype) -> Any:
    name: Any = {torch.float32: "float32", torch.bfloat16: "bfloat16"}[dtype]
    return compatibility.build(model(kv_heads), model="m", dtype=name, page_size=PAGE)


class Owner(AttentionOwnerServicer):
    """One owner rank: Describe and Write around a Receiver. `stalled`: Write reads nothing."""

    def __init__(self, kind: str, kv_heads: int, tp: int, rank: int, dtype: torch.dtype) -> None:
        self.heads = shard(kv_heads, tp, rank).kv_heads
        self.storage = pool(len(self.heads), dtype)
        self.windows = WriteWindows()
        chosen: Any = kind
        self.receiver: Receiver = make_receiver(
            chosen, self.storage, range(LAYERS), self.heads, self.windows
        )
        self.compatibility = fits(kv_heads, dtype)
        self.described = 0
        self.stalled = False
        self.address = ""
        self.rank = rank

    async def start(self, port: int = 0) -> aio.Server:
        server = aio.server(interceptors=[ErrorInterceptor()])
        add_AttentionOwnerServicer_to_server(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        await server.start()
        return server

    async def Describe(self, request: Any, context: Any) -> OwnerDescription:
        self.described += 1
        return OwnerDescription(
            compatibility=self.compatibility,
            epoch=EPOCH,
            tp_rank=self.rank,
            head_start=self.heads.start,
            head_stop=self.heads.stop,
            pages=self.storage.shape[2],
            kv_bytes=self.storage.nbytes,
            nixl_metadata=self.receiver.nixl_metadata,
            nixl_address=self.receiver.nixl_address,
        )

    async def Write(self, request_iterator: Any, context: Any) -> Any:
        if self.stalled:
            await asyncio.Event().wait()
        return await write(self.receiver, request_iterator)

    def placement(self, pages: list[int], start: int, stop: int, node: int = 0) -> Placement:
        return Placement(
            node=node, tp_rank=self.rank, layer_start=0, layer_stop=LAYERS,
            head_start=self.heads.start, head_stop=self.heads.stop,
            token_start=start, token_stop=stop, pages=pages,
        )  # fmt: skip

    @property
    def raw(self) -> torch.Tensor:
        return raw(self.storage)

    def expected(self, placement: Placement, ranks: list[Rank]) -> torch.Tensor:
        """What the pool should hold, written one slot at a time by definition."""
        want = pool(len(self.heads), self.storage.data.dtype)
        for head in self.heads:
            source = next(rank for rank in ranks if head in rank.shard.kv_heads)
            src_head = source.shard.kv_heads.index(head)
            for token in range(placement.token_start, min(placement.token_stop, TOKENS)):
                src = source.pages[token // PAGE]
                dst = placement.pages[(token - placement.token_start) // PAGE]
                slot = token % PAGE
                raw(want)[:, :, dst, self.heads.index(head), slot] = raw(source.storage)[
                    :, :, src, src_head, slot
                ]
        return raw(want)


@dataclass
class Rank:
    """One prefill rank with the prompt's KV in its pages."""

    storage: KvStorage
    sender: Sender
    shard: Shard
    pages: tuple[int, ...]

    @property
    def raw(self) -> torch.Tensor:
        return raw(self.storage)

    async def open(self, placements: list[Placement], addresses: list[str]) -> Push:
        return await self.sender.open(KEY, EPOCH, WRITER, placements, addresses, self.pages)

    @staticmethod
    async def push_all(push: Push, chunks: tuple[tuple[int, int], ...] = CHUNKS) -> None:
        def compute() -> None:
            for start, stop in chunks:
                for layer in range(LAYERS):
                    push.push(layer, start, stop)

        await asyncio.to_thread(compute)


@asynccontextmanager
async def owners(
    kind: str, kv_heads: int, tp: int, dtype: torch.dtype, nodes: int = 1
) -> AsyncIterator[list[Owner]]:
    made = [Owner(kind, kv_heads, tp, i % tp, dtype) for i in range(nodes * tp)]
    servers = [await owner.start() for owner in made]
    try:
        yield made
    finally:
        for server in servers:
            await server.stop(0)
        for owner in made:
            owner.receiver.close()


@asynccontextmanager
async def prefill(
    kind: str, kv_heads: int, tp: int, dtype: torch.dtype, timeout_s: float = TIMEOUT_S
) -> AsyncIterator[list[Rank]]:
    ranks = []
    for rank in range(tp):
        mine = shard(kv_heads, tp, rank)
        storage = KvStorage(LAYERS, 9, len(mine.kv_heads), PAGE, HEAD_DIM, dtype)
        random = torch.Generator().manual_seed(100 + mine.kv_heads.start)
        raw(storage).random_(0, 256, generator=random)
        chosen: Any = kind
        sender = make_sender(chosen, storage, mine, fits(kv_heads, dtype), timeout_s=timeout_s)
        ranks.append(Rank(storage, sender, mine, (7, 0, 3, 4, 5, 1)))
    try:
        yield ranks
    finally:
        for made in ranks:
            await made.sender.close()


class OwnerProcess:
    """This file as a process: an owner of 2 KV heads, every page open to WRITER."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__)), kind],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.address = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the owner process ended early"
        return line.strip()

    def digest(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write("digest\n")
        self.process.stdin.flush()
        return self._line()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


async def _serve(kind: str) -> None:
    owner = Owner(kind, 2, 1, 0, torch.float32)
    owner.windows.open(KEY, WRITER, range(POOL_PAGES))
    server = await owner.start()
    print(owner.address, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(hashlib.sha256(raw(owner.storage).numpy()).hexdigest(), flush=True)
    await server.stop(0)


@pytest.fixture(
    params=[
        pytest.param(
            kind,
            marks=pytest.mark.skipif(
                kind == "nixl" and bool(nixl_available()), reason=str(nixl_available())
            ),
        )
        for kind in get_args(Kind)
    ]
)
def kind(request: pytest.FixtureRequest) -> str:
    """How KV travels."""
    chosen: str = request.param
    return chosen


@pytest.fixture(name="make_owner")
def _make_owner() -> type[Owner]:
    """Of (kind, kv_heads, tp, rank, dtype); not served yet."""
    return Owner


@pytest.fixture(name="owners")
def _owners() -> Callable[..., Any]:
    """`async with owners(kind, kv_heads, tp, dtype, nodes=1) as ranks`: served ones."""
    return owners


@pytest.fixture(name="prefill")
def _prefill() -> Callable[..., Any]:
    """`async with prefill(kind, kv_heads, tp, dtype) as ranks`, with a prompt in their pages."""
    return prefill


@pytest.fixture
def owner_process() -> Iterator[Callable[[str], OwnerProcess]]:
    made: list[OwnerProcess] = []

    def start(kind: str) -> OwnerProcess:
        made.append(OwnerProcess(kind))
        return made[-1]

    yield start
    for process in made:
        process.kill()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
