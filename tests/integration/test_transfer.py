"""KV arrives byte for byte, and nothing else of the owner's pool changes, over real connections.

Owners are gRPC servers on loopback with real NIXL agents: in this process, or, where one has to be
killed or frozen, this file run as a process of its own; hence one file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from grpc import aio

from tknp.errors import DeadlineExceeded, ProtocolError, TknpError, Unavailable
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
KINDS = [
    pytest.param(kind, marks=pytest.mark.skipif(kind == "nixl" and bool(nixl_available()),
                                                reason=str(nixl_available())))
    for kind in get_args(Kind)
]  # fmt: skip


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


@dataclass
class Rank:
    """One prefill rank with the prompt's KV in its pages."""

    storage: KvStorage
    sender: Sender
    shard: Shard
    pages: tuple[int, ...]


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


async def opened(rank: Rank, placements: list[Placement], addresses: list[str]) -> Push:
    return await rank.sender.open(KEY, EPOCH, WRITER, placements, addresses, rank.pages)


async def push_all(push: Push, chunks: tuple[tuple[int, int], ...] = CHUNKS) -> None:
    def compute() -> None:
        for start, stop in chunks:
            for layer in range(LAYERS):
                push.push(layer, start, stop)

    await asyncio.to_thread(compute)


def expected(
    owner: Owner, placement: Placement, ranks: list[Rank], tokens: int = TOKENS
) -> torch.Tensor:
    """The owner's pool, written one slot at a time by definition."""
    want = pool(len(owner.heads), owner.storage.data.dtype)
    for head in owner.heads:
        source = next(rank for rank in ranks if head in rank.shard.kv_heads)
        src_head = source.shard.kv_heads.index(head)
        for token in range(placement.token_start, min(placement.token_stop, tokens)):
            src = source.pages[token // PAGE]
            dst = placement.pages[(token - placement.token_start) // PAGE]
            slot = token % PAGE
            raw(want)[:, :, dst, owner.heads.index(head), slot] = raw(source.storage)[
                :, :, src, src_head, slot
            ]
    return raw(want)


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "prefill_tp", "tp"),
    [
        (torch.float32, 2, 4, 1),
        (torch.float32, 2, 1, 4),
        (torch.bfloat16, 2, 2, 1),
        (torch.bfloat16, 8, 1, 2),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
async def test_kv_arrives_whole_and_alone(
    kind: str, dtype: torch.dtype, kv_heads: int, prefill_tp: int, tp: int
) -> None:
    async with (
        owners(kind, kv_heads, tp, dtype) as to,
        prefill(kind, kv_heads, prefill_tp, dtype) as ranks,
    ):
        ids = [10, 11, 2, 5, 3, 9, 8]
        placements = [owner.placement(ids, 0, TOKENS + 7) for owner in to]
        for owner in to:
            owner.windows.open(KEY, WRITER, ids)
        sent = 0
        for rank in ranks:
            assert rank.sender.kind == kind
            push = await opened(rank, placements, [owner.address for owner in to])
            await push_all(push)
            sent += await push.finish()
        for owner, placement in zip(to, placements, strict=True):
            assert torch.equal(raw(owner.storage), expected(owner, placement, ranks))
        slot_bytes = sum(len(owner.heads) for owner in to) * LAYERS * 2 * HEAD_DIM * dtype.itemsize
        assert sent == TOKENS * slot_bytes


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_is_split_over_two_owners(kind: str) -> None:
    async with (
        owners(kind, 2, 1, torch.float32, nodes=2) as to,
        prefill(kind, 2, 2, torch.float32) as ranks,
    ):
        placements = [to[0].placement([4, 5, 6], 0, 12), to[1].placement([6, 2, 3], 12, 24, 1)]
        for owner in to:
            owner.windows.open(KEY, WRITER, range(2, 7))
        for rank in ranks:
            push = await opened(rank, placements, [owner.address for owner in to])
            await push_all(push)
            await push.finish()
        for owner, placement in zip(to, placements, strict=True):
            assert torch.equal(raw(owner.storage), expected(owner, placement, ranks))


@pytest.mark.parametrize("kind", KINDS)
async def test_abort_stops_a_push_and_leaves_other_pages_alone(kind: str) -> None:
    async with (
        owners(kind, 2, 1, torch.float32) as (owner,),
        prefill(kind, 2, 1, torch.float32) as (rank,),
    ):
        ids = [4, 5, 6, 7, 8, 9]
        owner.windows.open(KEY, WRITER, ids)
        placements = [owner.placement(ids, 0, 24)]
        push = await opened(rank, placements, [owner.address])
        await push_all(push, CHUNKS[:1])
        await push.abort()
        await push.abort()
        owner.windows.close(KEY, WRITER)
        before = raw(owner.storage).clone()
        with pytest.raises(Unavailable, match="aborted"):
            push.push(0, 6, 13)
        others = [page for page in range(POOL_PAGES) if page not in ids[:2]]
        assert (raw(owner.storage)[:, :, others] == POISON).all()
        raw(rank.storage).fill_(0)

        owner.windows.open(KEY, WRITER, ids)  # the owner and the sender can go on
        again = await opened(rank, placements, [owner.address])
        await push_all(again)
        await again.finish()
        assert torch.equal(raw(owner.storage), expected(owner, placements[0], [rank]))
        assert not torch.equal(raw(owner.storage), before)


async def test_chunks_without_a_window_are_refused() -> None:
    async with (
        owners("grpc", 2, 1, torch.float32) as (owner,),
        prefill("grpc", 2, 1, torch.float32) as (rank,),
    ):
        ids = [4, 5, 6, 7, 8, 9]
        placements = [owner.placement(ids, 0, 24)]
        push = await opened(rank, placements, [owner.address])
        await push_all(push, CHUNKS[:1])
        with pytest.raises(ProtocolError, match=r"owner rank \(0, 0\) at .*no open transfer"):
            await push.finish()
        with pytest.raises(ProtocolError, match="no open transfer"):
            push.push(0, 6, 13)
        await push.abort()

        owner.windows.open(KEY, WRITER, ids[:3])
        push = await opened(rank, placements, [owner.address])
        await push_all(push, ((0, 12),))
        await push.finish()
        raw(owner.storage).fill_(POISON)
        push = await opened(rank, placements, [owner.address])
        await push_all(push, ((12, TOKENS),))
        with pytest.raises(ProtocolError, match="page 7"):
            await push.finish()
        await push.abort()
        assert (raw(owner.storage) == POISON).all()


async def test_compute_waits_for_a_stalled_owner_until_the_timeout() -> None:
    async with (
        owners("grpc", 2, 1, torch.float32) as (owner,),
        prefill("grpc", 2, 1, torch.float32, timeout_s=0.3) as (rank,),
    ):
        owner.stalled = True
        push = await opened(rank, [owner.placement(list(range(1, 7)), 0, 24)], [owner.address])

        def compute() -> None:
            while True:
                push.push(0, 0, TOKENS)

        with pytest.raises(DeadlineExceeded, match=r"owner rank \(0, 0\) at"):
            await asyncio.to_thread(compute)
        await push.abort()


@pytest.mark.parametrize("kind", KINDS)
async def test_tokens_that_no_owner_keeps_are_refused(kind: str) -> None:
    async with (
        owners(kind, 2, 1, torch.float32) as (owner,),
        prefill(kind, 2, 1, torch.float32) as (rank,),
    ):
        push = await opened(rank, [owner.placement([1, 2], 0, 8)], [owner.address])
        with pytest.raises(ProtocolError, match=r"tokens \[8, 13\)"):
            push.push(0, 6, 13)
        with pytest.raises(TknpError, match="tokens"):
            push.push(0, 0, 25)
        with pytest.raises(TknpError, match="layer=3"):
            push.push(LAYERS, 0, 4)
        await push.abort()


@pytest.mark.skipif(bool(nixl_available()), reason=str(nixl_available()))
async def test_an_owner_without_nixl() -> None:
    async with owners("grpc", 2, 1, torch.float32) as (owner,):
        ids = list(range(1, 7))
        placements = [owner.placement(ids, 0, 24)]
        owner.windows.open(KEY, WRITER, ids)
        async with prefill("auto", 2, 1, torch.float32) as (rank,):
            assert rank.sender.kind == "nixl"
            push = await opened(rank, placements, [owner.address])
            await push_all(push)
            await push.finish()
            assert torch.equal(raw(owner.storage), expected(owner, placements[0], [rank]))
        async with prefill("nixl", 2, 1, torch.float32) as (rank,):
            with pytest.raises(ProtocolError, match="set kv_transfer to auto or grpc"):
                await opened(rank, placements, [owner.address])


def _page_size(owner: Owner) -> None:
    owner.compatibility.page_size = 64


def _heads(owner: Owner) -> None:
    owner.heads = range(1, 3)


def _pages(owner: Owner) -> None:
    owner.storage = pool(2, torch.float32, pages=5)


def _bytes(owner: Owner) -> None:
    owner.storage = KvStorage(1, 11, 3, PAGE, HEAD_DIM, torch.float32)


@pytest.mark.skipif(bool(nixl_available()), reason=str(nixl_available()))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_page_size, "page_size differs"),
        (_heads, r"its pool holds \[1, 3\)"),
        (_pages, "page 5 is not in its pool of 5 pages"),
        (_bytes, "kv_bytes="),
    ],
)
async def test_an_owner_that_does_not_fit_is_never_written(
    change: Callable[[Owner], None], message: str
) -> None:
    async with (
        owners("nixl", 2, 1, torch.float32) as (owner,),
        prefill("nixl", 2, 1, torch.float32) as (rank,),
    ):
        placements = [owner.placement(list(range(1, 7)), 0, 24)]
        change(owner)
        with pytest.raises(ProtocolError, match=message):
            await opened(rank, placements, [owner.address])


@pytest.mark.parametrize("kind", KINDS)
async def test_an_owner_is_described_once_an_epoch(kind: str) -> None:
    async with (
        owners(kind, 2, 1, torch.float32) as (owner,),
        prefill(kind, 2, 1, torch.float32) as (rank,),
    ):
        placements = [owner.placement(list(range(1, 7)), 0, 24)]
        for epoch in (1, 1, 2, 2):
            push = await rank.sender.open(
                KEY, epoch, WRITER, placements, [owner.address], rank.pages
            )
            await push.abort()
        assert owner.described == (2 if kind == "nixl" else 0)


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


@pytest.mark.parametrize("kind", KINDS)
async def test_a_killed_owner_process_is_an_error_and_its_successor_works(kind: str) -> None:
    local = Owner("grpc", 2, 1, 0, torch.float32)  # the same shape, never served
    placements = [local.placement(list(range(2, 8)), 0, 24)]
    process = OwnerProcess(kind)
    try:
        async with prefill(kind, 2, 1, torch.float32) as (rank,):
            push = await opened(rank, placements, [process.address])
            await push_all(push)
            await push.finish()
            want = expected(local, placements[0], [rank])
            assert process.digest() == hashlib.sha256(want.numpy()).hexdigest()

            push = await opened(rank, placements, [process.address])
            await push_all(push, CHUNKS[:1])
            process.kill()
            with pytest.raises(Unavailable, match=r"owner rank \(0, 0\) at 127.0.0.1"):
                await _until_refused(push)
            await push.abort()
            with pytest.raises(Unavailable, match=process.address):
                await _until_refused(await opened(rank, placements, [process.address]))

            successor = Owner(kind, 2, 1, 0, torch.float32)
            successor.windows.open(KEY, WRITER, range(POOL_PAGES))
            server = await successor.start(int(process.address.rpartition(":")[2]))
            try:
                await _delivered(rank, placements, process.address)
                assert torch.equal(raw(successor.storage), want)
            finally:
                await server.stop(0)
                successor.receiver.close()
    finally:
        process.kill()


async def _delivered(rank: Rank, placements: list[Placement], address: str) -> None:
    """Push until it succeeds: gRPC refuses calls for a while before it connects again."""
    while True:
        try:
            push = await opened(rank, placements, [address])
        except Unavailable:
            continue
        try:
            await push_all(push)
            await push.finish()
            return
        except Unavailable:
            await push.abort()


async def _until_refused(push: Push) -> None:
    """Push until an error shows: the first bytes may leave before the loss is noticed."""
    for _ in range(1000):
        await push_all(push, CHUNKS[:1])
    await push.finish()


@pytest.mark.skipif(bool(nixl_available()), reason=str(nixl_available()))
async def test_writes_to_a_frozen_owner_end_in_an_error_and_abort_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # the owner's own process has to place the bytes
    local = Owner("grpc", 2, 1, 0, torch.float32)
    placements = [local.placement(list(range(2, 8)), 0, 24)]
    process = OwnerProcess("nixl")
    try:
        async with prefill("nixl", 2, 1, torch.float32, timeout_s=0.5) as (rank,):
            push = await opened(rank, placements, [process.address])
            await push_all(push)
            await push.finish()
            push = await opened(rank, placements, [process.address])
            process.freeze()
            await push_all(push)
            with pytest.raises(DeadlineExceeded, match="let no NIXL write end"):
                await push.finish()
            with pytest.raises(DeadlineExceeded, match="must stay quarantined"):
                await push.abort()
            process.thaw()
            await push.abort()
    finally:
        process.kill()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
