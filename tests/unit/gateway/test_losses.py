"""Requests that lose their pools, by clients that answer from memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tknp.client import RequestFailed
from tknp.errors import DeadlineExceeded, InvalidValue, ProtocolError, TknpError, Unavailable
from tknp.gateway.gateway import Gateway
from tknp.gateway.losses import Losses, is_lost
from tknp.gateway.pools import Pools
from tknp.gateway.settings import GatewaySettings
from tknp.v1.coordinator_pb2 import Status
from tknp.v1.inference_pb2 import GetModelResponse

GONE = Unavailable("the connection was lost")


class Breaking:
    """A client of a pool whose first `broken` calls fail though it says that it is ready."""

    def __init__(self, broken: int = 0) -> None:
        self.broken = broken
        self.calls = 0

    async def status(self, timeout_s: float) -> Status:
        return Status(ready=True)

    async def model(self, timeout_s: float) -> GetModelResponse:
        return GetModelResponse(name="m", max_model_len=64)

    async def tokenize(self, text: str, timeout_s: float, add_special_tokens: bool) -> list[int]:
        self.calls += 1
        if self.calls <= self.broken:
            raise GONE
        return list(text.encode())

    async def close(self) -> None:
        pass


@pytest.fixture
async def pools() -> AsyncIterator[Pools]:
    connect: Any = lambda _: Breaking()  # noqa: E731
    opened = Pools(("a:1",), connect)
    await opened.start()
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (GONE, True),
        (ProtocolError("cut"), True),
        (RequestFailed("UNAVAILABLE", "draining"), True),
        (RequestFailed("CANCELLED", "stopped"), True),
        (RequestFailed("DEADLINE_EXCEEDED", "late"), False),
        (RequestFailed("INTERNAL", "broken"), False),
        (DeadlineExceeded("late"), False),
        (InvalidValue("n", 0, "1"), False),
    ],
)
def test_what_is_a_loss(error: TknpError, lost: bool) -> None:
    assert is_lost(error) == lost


async def test_pauses_grow_while_a_pool_brings_nothing(pools: Pools) -> None:
    paused: list[float] = []

    async def pause(seconds: float) -> None:
        paused.append(seconds)
        await pools.upstreams[0].look()

    losses = Losses(pools, "m", 9, 60.0, pause=pause)
    upstream = await losses.first()
    for brought in (False, False, True, False):
        upstream = await losses.next(upstream, GONE, brought=brought)
    assert paused == [1.0, 2.0, 4.0]


async def test_a_pool_may_be_lost_so_often_and_no_more(pools: Pools) -> None:
    losses = Losses(pools, "m", 2, 60.0, pause=lambda _: pools.upstreams[0].look())
    upstream = await losses.first()
    for _ in range(2):
        upstream = await losses.next(upstream, GONE, brought=False)
        assert upstream.ready
    with pytest.raises(Unavailable, match="connection was lost"):
        await losses.next(upstream, GONE, brought=True)
    assert not upstream.ready


async def test_what_a_pool_says_of_a_request_is_for_the_client(pools: Pools) -> None:
    losses = Losses(pools, "m", 2, 60.0)
    upstream = await losses.first()
    with pytest.raises(DeadlineExceeded):
        await losses.next(upstream, DeadlineExceeded("late"), brought=True)
    assert upstream.ready


async def test_without_replays_nobody_waits(pools: Pools) -> None:
    losses = Losses(pools, "m", 0, 60.0)
    upstream = await losses.first()
    with pytest.raises(Unavailable, match="connection was lost"):
        await losses.next(upstream, GONE, brought=False)
    with pytest.raises(Unavailable, match="connection was lost"):
        await losses.first()


@pytest.mark.parametrize(("replays", "calls"), [(3, 2), (0, 1)])
async def test_a_pool_that_breaks_while_it_tokenizes(replays: int, calls: int) -> None:
    client: Any = Breaking(broken=1)
    gateway = Gateway(GatewaySettings(pools=("a:1",), replays=replays), lambda _: client)
    tenant = gateway.keys.tenant(None)
    await gateway.start()
    try:
        if replays:
            assert await gateway.encode("m", "ab", tenant, gateway.deadline_s()) == [97, 98]
        else:
            with pytest.raises(Unavailable, match="connection was lost"):
                await gateway.encode("m", "ab", tenant, gateway.deadline_s())
            with pytest.raises(Unavailable):  # nobody is let in, whatever the prompt is
                await gateway.encode("m", [1, 2], tenant, gateway.deadline_s())
    finally:
        await gateway.close()
    assert client.calls == calls
