"""Which pool a request goes to, by clients that answer from memory."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tknp.errors import InvalidValue, Unavailable
from tknp.gateway.pools import Pools, UnknownModel
from tknp.v1.coordinator_pb2 import Status
from tknp.v1.inference_pb2 import GetModelResponse


class Known:
    """A client of a pool whose status is set by the test; None: it doesn't answer."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.state: Status | None = Status(ready=True)

    async def status(self, timeout_s: float) -> Status:
        if self.state is None:
            raise Unavailable(f"no server answers at {self.target}")
        return self.state

    async def model(self, timeout_s: float) -> GetModelResponse:
        return GetModelResponse(name=self.target.partition(":")[0], max_model_len=64)

    async def close(self) -> None:
        pass


@pytest.fixture
def clients() -> dict[str, Known]:
    return {target: Known(target) for target in ("a:1", "a:2", "b:1")}


async def started(clients: dict[str, Known], *targets: str) -> Pools:
    connect: Any = clients.__getitem__
    pools = Pools(targets, connect)
    await pools.start()
    return pools


async def test_the_least_loaded_of_a_model(clients: dict[str, Known]) -> None:
    pools = await started(clients, "a:1", "a:2", "b:1")
    assert [model.name for model in pools.models] == ["a", "b"]
    clients["a:1"].state = Status(ready=True, running=3, queued=1)
    clients["a:2"].state = Status(ready=True, running=2)
    await pools.looked()
    assert pools.pick("a").target == "a:2"
    with pools.pick("a").taken(), pools.pick("a").taken(), pools.pick("a").taken():
        assert pools.pick("a").inflight == 3
        with pools.pick("a").taken():
            assert pools.upstreams[1].inflight == 4
    assert pools.pick("b").target == "b:1"
    with pytest.raises(UnknownModel, match="served here: a, b"):
        pools.pick("c")
    with pytest.raises(InvalidValue, match="a, b are served"):
        pools.named(None)
    assert pools.named("c") == "c"
    await pools.close()


async def test_a_lost_pool_is_asked_again_when_it_answers(clients: dict[str, Known]) -> None:
    pools = await started(clients, "a:1", "a:2")
    clients["a:2"].state = Status(ready=False, error="a node is lost")
    clients["a:1"].state = None
    await pools.looked()
    with pytest.raises(Unavailable, match="a node is lost"):
        pools.pick("a")
    with pytest.raises(Unavailable, match="no server answers"):
        await pools.wait("a", 0.0)
    waiting = asyncio.create_task(pools.wait("a", 60.0))
    await pools.looked()
    assert not waiting.done()
    clients["a:1"].state = Status(ready=True)
    assert (await waiting).target == "a:1"
    pools.pick("a").lost("it broke a call")
    with pytest.raises(Unavailable):
        pools.pick("a")
    await pools.close()
    with pytest.raises(Unavailable):
        pools.check()


async def test_what_a_pool_said_before_it_broke_a_call_is_old(clients: dict[str, Known]) -> None:
    pools = await started(clients, "a:1")
    (upstream,) = pools.upstreams
    client = clients["a:1"]
    asked, answer = asyncio.Event(), asyncio.Event()
    at_once = client.status

    async def slowly(timeout_s: float) -> Status:
        asked.set()
        await answer.wait()
        return await at_once(timeout_s)

    client.status = slowly  # type: ignore[method-assign]
    looking = asyncio.create_task(upstream.look())
    await asked.wait()
    upstream.lost("it broke a call")
    answer.set()
    await looking
    assert not upstream.ready
    await upstream.look()
    assert upstream.ready
    await pools.close()


async def test_a_model_that_may_yet_appear_is_not_unknown(clients: dict[str, Known]) -> None:
    clients["b:1"].state = None
    pools = await started(clients, "a:1", "b:1")
    with pytest.raises(Unavailable, match="b:1"):
        pools.pick("b")
    assert pools.named(None) == "a"
    await pools.close()


async def test_a_name_is_resolved_to_all_that_it_has(clients: dict[str, Known]) -> None:
    connected: list[str] = []

    def connect(target: str) -> Any:
        connected.append(target)
        return Known(target)

    pools = Pools(("dns:localhost:7",), connect)
    await pools.start()
    assert connected
    assert all(target in ("127.0.0.1:7", "[::1]:7") for target in connected)
    await pools.close()
