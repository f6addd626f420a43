"""What a pool waits for at its start, and what ends the start; services with canned answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tknp.coordinator.startup import Peers
from tknp.errors import ProtocolError, Unavailable
from tknp.rpc.security import PLAINTEXT
from tknp.v1 import attention_owner_pb2_grpc, decode_root_pb2_grpc, prefill_pb2_grpc
from tknp.v1.attention_owner_pb2 import OwnerDescription
from tknp.v1.common_pb2 import Compatibility, DescribeRequest, Phase, Progress
from tknp.v1.decode_root_pb2 import RootDescription
from tknp.v1.prefill_pb2 import PrefillDescription

WARMING = Progress(phase=Phase.PHASE_WARMING)
READY = Progress(phase=Phase.PHASE_READY)
LOADING = Progress(phase=Phase.PHASE_LOADING)
FAILED = Progress(phase=Phase.PHASE_FAILED, error="no memory")


class Canned:
    """One process: its answer to Describe is what its fields say."""

    def __init__(self, kind: type[Any], progress: Progress, compatibility: Compatibility) -> None:
        self.kind, self.progress, self.compatibility = kind, progress, compatibility
        self.asked = asyncio.Semaphore(0)

    async def Describe(self, request: DescribeRequest, context: Any) -> Any:
        self.asked.release()
        return self.kind(progress=self.progress, compatibility=self.compatibility)


@pytest.fixture
def pool(make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]) -> Any:
    return make_pool(random_checkpoint(layers=2), nodes=1, prefill=2, page_size=16)


@asynccontextmanager
async def listening(address: str, *services: Canned) -> AsyncIterator[None]:
    """A port with `services`."""
    add: dict[type[Any], Callable[[Any, Any], None]] = {
        RootDescription: decode_root_pb2_grpc.add_DecodeRootServicer_to_server,
        OwnerDescription: attention_owner_pb2_grpc.add_AttentionOwnerServicer_to_server,
        PrefillDescription: prefill_pb2_grpc.add_PrefillServicer_to_server,
    }
    rest = {
        RootDescription: decode_root_pb2_grpc.DecodeRootServicer,
        OwnerDescription: attention_owner_pb2_grpc.AttentionOwnerServicer,
        PrefillDescription: prefill_pb2_grpc.PrefillServicer,
    }
    server = grpc.aio.server()
    for service in services:
        whole = type("Whole", (rest[service.kind],), {"Describe": staticmethod(service.Describe)})
        add[service.kind](whole(), server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


@asynccontextmanager
async def starting(pool: Any, decode: Progress = WARMING) -> AsyncIterator[asyncio.Task[None]]:
    """A start of `pool` with a decode node that says `decode`."""
    node = pool.config.nodes[0].addresses[0]
    said = [Canned(kind, decode, pool.compatibility) for kind in (RootDescription,
                                                                  OwnerDescription)]  # fmt: skip
    peers = Peers(pool, PLAINTEXT)
    async with listening(node, *said):
        start = asyncio.create_task(peers.ready(lambda _: ()))
        try:
            yield start
        finally:
            start.cancel()
            await asyncio.gather(start, return_exceptions=True)
            await peers.close()


def prefill(pool: Any, progress: Progress, **differing: Any) -> Canned:
    compatibility = Compatibility()
    compatibility.CopyFrom(pool.compatibility)
    for name, value in differing.items():
        setattr(compatibility, name, value)
    return Canned(PrefillDescription, progress, compatibility)


@pytest.mark.parametrize("other", [None, LOADING, FAILED])
async def test_one_prefill_replica_is_enough(pool: Any, other: Progress | None) -> None:
    first, second = (replica.addresses[0] for replica in pool.config.prefill)
    async with starting(pool) as start:
        if other is None:
            async with listening(first, prefill(pool, READY)):
                await start
        else:
            async with (
                listening(second, prefill(pool, other)),
                listening(first, prefill(pool, READY)),
            ):
                await start


async def test_a_failure_ends_the_start_once_no_other_replica_can_come(pool: Any) -> None:
    first, second = (replica.addresses[0] for replica in pool.config.prefill)
    failed = prefill(pool, FAILED)
    async with starting(pool) as start, listening(first, failed):
        for _ in range(3):
            await failed.asked.acquire()
        assert not start.done()  # it has looked at two answers, and the second may still come
        async with listening(second, prefill(pool, READY, dtype="float16")):
            with pytest.raises(Unavailable) as raised:
                await start
    assert "prefill 0, rank 0 at " in str(raised.value)
    assert "no memory; prefill 1, rank 0 at " in str(raised.value)
    assert "dtype differs" in str(raised.value)


async def test_the_only_replica_ends_the_start_as_what_it_is(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> None:
    pool = make_pool(random_checkpoint(layers=2), nodes=1, page_size=16)
    address = pool.config.prefill[0].addresses[0]
    async with starting(pool) as start, listening(address, prefill(pool, READY, model="other")):
        with pytest.raises(ProtocolError, match="model differs"):
            await start


async def test_a_decode_rank_is_needed_in_any_case(pool: Any) -> None:
    address = pool.config.prefill[0].addresses[0]
    async with starting(pool, FAILED) as start, listening(address, prefill(pool, READY)):
        with pytest.raises(Unavailable, match=r"decode node 0, rank 0 at .*: no memory"):
            await start
