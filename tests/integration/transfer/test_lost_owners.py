"""Owners that are killed or frozen while KV is pushed to them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from tknp.errors import DeadlineExceeded, Unavailable
from tknp.transfer.base import Push
from tknp.transfer.nixl_agent import nixl_available
from tknp.v1.common_pb2 import Placement, RequestKey

POOL_PAGES = 12
TOKENS = 21
CHUNKS = ((0, 6), (6, 13), (13, TOKENS))
KEY = RequestKey(request_id="r", attempt=1)
WRITER = "prefill-0"


async def test_a_killed_owner_process_is_an_error_and_its_successor_works(
    kind: str, prefill: Any, make_owner: Any, owner_process: Any
) -> None:
    local = make_owner("grpc", 2, 1, 0, torch.float32)  # the same shape, never served
    placements = [local.placement(list(range(2, 8)), 0, 24)]
    process = owner_process(kind)
    async with prefill(kind, 2, 1, torch.float32) as (rank,):
        push = await rank.open(placements, [process.address])
        await rank.push_all(push)
        await push.finish()
        want = local.expected(placements[0], [rank])
        assert process.digest() == hashlib.sha256(want.numpy()).hexdigest()

        push = await rank.open(placements, [process.address])
        await rank.push_all(push, CHUNKS[:1])
        process.kill()
        with pytest.raises(Unavailable, match=r"owner rank \(0, 0\) at 127.0.0.1"):
            await _until_refused(rank, push)
        await push.abort()
        with pytest.raises(Unavailable, match=process.address):
            await _until_refused(rank, await rank.open(placements, [process.address]))

        successor = make_owner(kind, 2, 1, 0, torch.float32)
        successor.windows.open(KEY, WRITER, range(POOL_PAGES))
        server = await successor.start(int(process.address.rpartition(":")[2]))
        try:
            await _delivered(rank, placements, process.address)
            assert torch.equal(successor.raw, want)
        finally:
            await server.stop(0)
            successor.receiver.close()


async def _delivered(rank: Any, placements: list[Placement], address: str) -> None:
    """Push until it succeeds: gRPC refuses calls for a while before it connects again."""
    while True:
        try:
            push = await rank.open(placements, [address])
        except Unavailable:
            continue
        try:
            await rank.push_all(push)
            await push.finish()
            return
        except Unavailable:
            await push.abort()


async def _until_refused(rank: Any, push: Push) -> None:
    """Push until an error shows: the first bytes may leave before the loss is noticed."""
    for _ in range(1000):
        await rank.push_all(push, CHUNKS[:1])
    await push.finish()


@pytest.mark.skipif(bool(nixl_available()), reason=str(nixl_available()))
async def test_writes_to_a_frozen_owner_end_in_an_error_and_abort_says_so(
    monkeypatch: pytest.MonkeyPatch,
    prefill: Any,
    make_owner: Any,
    owner_process: Any,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # the owner's own process has to place the bytes
    local = make_owner("grpc", 2, 1, 0, torch.float32)
    placements = [local.placement(list(range(2, 8)), 0, 24)]
    process = owner_process("nixl")
    async with prefill("nixl", 2, 1, torch.float32, timeout_s=0.5) as (rank,):
        push = await rank.open(placements, [process.address])
        await rank.push_all(push)
        await push.finish()
        push = await rank.open(placements, [process.address])
        process.freeze()
        await rank.push_all(push)
        with pytest.raises(DeadlineExceeded, match="let no NIXL write end"):
            await push.finish()
        with pytest.raises(DeadlineExceeded, match="must stay quarantined"):
            await push.abort()
        process.thaw()
        await push.abort()
