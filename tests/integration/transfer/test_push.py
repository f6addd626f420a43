"""KV arrives byte for byte, and nothing else of the owner's pool changes, over real connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tknp.errors import DeadlineExceeded, ProtocolError, TknpError, Unavailable
from tknp.kv.storage import KvStorage
from tknp.transfer.nixl_agent import nixl_available
from tknp.v1.common_pb2 import RequestKey

PAGE = 4
HEAD_DIM = 64
POOL_PAGES = 12
LAYERS = 3
TOKENS = 21
CHUNKS = ((0, 6), (6, 13), (13, TOKENS))
KEY = RequestKey(request_id="r", attempt=1)
WRITER = "prefill-0"
POISON = 0xA5


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "prefill_tp", "tp"),
    [
        (torch.float32, 2, 4, 1),
        (torch.float32, 2, 1, 4),
        (torch.bfloat16, 2, 2, 1),
        (torch.bfloat16, 8, 1, 2),
    ],
)
async def test_kv_arrives_whole_and_alone(
    kind: str,
    dtype: torch.dtype,
    kv_heads: int,
    prefill_tp: int,
    tp: int,
    owners: Any,
    prefill: Any,
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
            push = await rank.open(placements, [owner.address for owner in to])
            await rank.push_all(push)
            sent += await push.finish()
        for owner, placement in zip(to, placements, strict=True):
            assert torch.equal(owner.raw, owner.expected(placement, ranks))
        slot_bytes = sum(len(owner.heads) for owner in to) * LAYERS * 2 * HEAD_DIM * dtype.itemsize
        assert sent == TOKENS * slot_bytes


async def test_a_prompt_is_split_over_two_owners(kind: str, owners: Any, prefill: Any) -> None:
    async with (
        owners(kind, 2, 1, torch.float32, nodes=2) as to,
        prefill(kind, 2, 2, torch.float32) as ranks,
    ):
        placements = [to[0].placement([4, 5, 6], 0, 12), to[1].placement([6, 2, 3], 12, 24, 1)]
        for owner in to:
            owner.windows.open(KEY, WRITER, range(2, 7))
        for rank in ranks:
            push = await rank.open(placements, [owner.address for owner in to])
            await rank.push_all(push)
            await push.finish()
        for owner, placement in zip(to, placements, strict=True):
            assert torch.equal(owner.raw, owner.expected(placement, ranks))


async def test_abort_stops_a_push_and_leaves_other_pages_alone(
    kind: str, owners: Any, prefill: Any
) -> None:
    async with (
        owners(kind, 2, 1, torch.float32) as (owner,),
        prefill(kind, 2, 1, torch.float32) as (rank,),
    ):
        ids = [4, 5, 6, 7, 8, 9]
        owner.windows.open(KEY, WRITER, ids)
        placements = [owner.placement(ids, 0, 24)]
        push = await rank.open(placements, [owner.address])
        await rank.push_all(push, CHUNKS[:1])
        await push.abort()
        await push.abort()
        owner.windows.close(KEY, WRITER)
        before = owner.raw.clone()
        with pytest.raises(Unavailable, match="aborted"):
            push.push(0, 6, 13)
        others = [page for page in range(POOL_PAGES) if page not in ids[:2]]
        assert (owner.raw[:, :, others] == POISON).all()
        rank.raw.fill_(0)

        owner.windows.open(KEY, WRITER, ids)  # the owner and the sender can go on
        again = await rank.open(placements, [owner.address])
        await rank.push_all(again)
        await again.finish()
        assert torch.equal(owner.raw, owner.expected(placements[0], [rank]))
        assert not torch.equal(owner.raw, before)


async def test_chunks_without_a_window_are_refused(owners: Any, prefill: Any) -> None:
    async with (
        owners("grpc", 2, 1, torch.float32) as (owner,),
        prefill("grpc", 2, 1, torch.float32) as (rank,),
    ):
        ids = [4, 5, 6, 7, 8, 9]
        placements = [owner.placement(ids, 0, 24)]
        push = await rank.open(placements, [owner.address])
        await rank.push_all(push, CHUNKS[:1])
        with pytest.raises(ProtocolError, match=r"owner rank \(0, 0\) at .*no open transfer"):
            await push.finish()
        with pytest.raises(ProtocolError, match="no open transfer"):
            push.push(0, 6, 13)
        await push.abort()

        owner.windows.open(KEY, WRITER, ids[:3])
        push = await rank.open(placements, [owner.address])
        await rank.push_all(push, ((0, 12),))
        await push.finish()
        owner.raw.fill_(POISON)
        push = await rank.open(placements, [owner.address])
        await rank.push_all(push, ((12, TOKENS),))
        with pytest.raises(ProtocolError, match="page 7"):
            await push.finish()
        await push.abort()
        assert (owner.raw == POISON).all()


async def test_compute_waits_for_a_stalled_owner_until_the_timeout(
    owners: Any, prefill: Any
) -> None:
    async with (
        owners("grpc", 2, 1, torch.float32) as (owner,),
        prefill("grpc", 2, 1, torch.float32, timeout_s=0.3) as (rank,),
    ):
        owner.stalled = True
        push = await rank.open([owner.placement(list(range(1, 7)), 0, 24)], [owner.address])

        def compute() -> None:
            while True:
                push.push(0, 0, TOKENS)

        with pytest.raises(DeadlineExceeded, match=r"owner rank \(0, 0\) at"):
            await asyncio.to_thread(compute)
        await push.abort()


async def test_tokens_that_no_owner_keeps_are_refused(kind: str, owners: Any, prefill: Any) -> None:
    async with (
        owners(kind, 2, 1, torch.float32) as (owner,),
        prefill(kind, 2, 1, torch.float32) as (rank,),
    ):
        push = await rank.open([owner.placement([1, 2], 0, 8)], [owner.address])
        with pytest.raises(ProtocolError, match=r"tokens \[8, 13\)"):
            push.push(0, 6, 13)
        with pytest.raises(TknpError, match="tokens"):
            push.push(0, 0, 25)
        with pytest.raises(TknpError, match="layer=3"):
            push.push(LAYERS, 0, 4)
        await push.abort()


@pytest.mark.skipif(bool(nixl_available()), reason=str(nixl_available()))
async def test_an_owner_without_nixl(owners: Any, prefill: Any) -> None:
    async with owners("grpc", 2, 1, torch.float32) as (owner,):
        ids = list(range(1, 7))
        placements = [owner.placement(ids, 0, 24)]
        owner.windows.open(KEY, WRITER, ids)
        async with prefill("auto", 2, 1, torch.float32) as (rank,):
            assert rank.sender.kind == "nixl"
            push = await rank.open(placements, [owner.address])
            await rank.push_all(push)
            await push.finish()
            assert torch.equal(owner.raw, owner.expected(placements[0], [rank]))
        async with prefill("nixl", 2, 1, torch.float32) as (rank,):
            with pytest.raises(ProtocolError, match="set kv_transfer to auto or grpc"):
                await rank.open(placements, [owner.address])


def _page_size(owner: Any) -> None:
    owner.compatibility.page_size = 64


def _heads(owner: Any) -> None:
    owner.heads = range(1, 3)


def _pages(owner: Any) -> None:
    owner.storage = KvStorage(LAYERS, 5, 2, PAGE, HEAD_DIM, torch.float32)


def _bytes(owner: Any) -> None:
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
    change: Callable[[Any], None], message: str, owners: Any, prefill: Any
) -> None:
    async with (
        owners("nixl", 2, 1, torch.float32) as (owner,),
        prefill("nixl", 2, 1, torch.float32) as (rank,),
    ):
        placements = [owner.placement(list(range(1, 7)), 0, 24)]
        change(owner)
        with pytest.raises(ProtocolError, match=message):
            await rank.open(placements, [owner.address])


async def test_an_owner_is_described_once_an_epoch(kind: str, owners: Any, prefill: Any) -> None:
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
