"""A pool that drains behind a name that leads to another one by now."""

from __future__ import annotations

from typing import Any

import pytest

from tknp.errors import Unavailable
from tknp.gateway.pools import Pools
from tknp.v1.common_pb2 import Phase
from tknp.v1.coordinator_pb2 import Status
from tknp.v1.inference_pb2 import GetModelResponse

READY = Status(ready=True, phase=Phase.PHASE_READY)
DRAINING = Status(ready=False, phase=Phase.PHASE_DRAINING)


class Connection:
    """A client of the pool that its address led to when it was dialled."""

    def __init__(self, name: str, state: Status) -> None:
        self.name = name
        self.state = state
        self.closed = False

    async def status(self, timeout_s: float) -> Status:
        return self.state

    async def model(self, timeout_s: float) -> GetModelResponse:
        return GetModelResponse(name="m", family=self.name, max_model_len=64)

    async def close(self) -> None:
        self.closed = True


class Name:
    """Where the address leads; every connection so far."""

    def __init__(self) -> None:
        self.dialled: list[Connection] = []
        self.leads_to = "old", READY

    def __call__(self, target: str) -> Any:
        self.dialled.append(Connection(*self.leads_to))
        return self.dialled[-1]


@pytest.fixture
async def world() -> Any:
    name = Name()
    pools = Pools(("s:1",), name)
    await pools.start()
    yield name, pools
    await pools.close()
    assert all(connection.closed for connection in name.dialled)


async def test_new_requests_go_to_the_next_one_and_streams_end_at_the_old_one(world: Any) -> None:
    name, pools = world
    (old,) = name.dialled
    with pools.pick("m").taken():
        name.leads_to = "new", READY
        old.state = DRAINING
        await pools.looked()
        assert pools.pick("m").client is name.dialled[1]
        await pools.looked()
        await pools.looked()
        assert not old.closed  # a stream is there
        assert len(name.dialled) == 2
    await pools.looked()
    await pools.looked()
    assert old.closed
    assert [upstream.target for upstream in pools.upstreams] == ["s:1"]


async def test_a_name_that_still_leads_to_the_old_one_is_dialled_until_it_does_not(
    world: Any,
) -> None:
    name, pools = world
    name.dialled[0].state = DRAINING
    name.leads_to = "old", DRAINING
    for _ in range(3):
        await pools.looked()
    with pytest.raises(Unavailable):
        pools.pick("m")
    assert pools.models[0].name == "m"  # it will be back
    name.leads_to = "new", READY
    await pools.looked()
    assert pools.pick("m").client is name.dialled[-1]
    assert pools.model("m").family == "new"


async def test_a_pool_that_its_name_has_no_more_ends_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And nobody is left while some name does not resolve."""
    has: dict[str, list[str] | None] = {"a": ["a:1", "a:2"], "b": ["b:1"]}

    async def addresses(target: str) -> list[str] | None:
        return has[target]

    monkeypatch.setattr("tknp.gateway.pools.addresses", addresses)
    monkeypatch.setattr("tknp.gateway.pools._RESOLVE_S", 1.0)
    name = Name()
    pools = Pools(("a", "b"), name)
    await pools.start()
    gone = pools.upstreams[1]
    client: Any = gone.client
    with gone.taken():
        has.update(a=["a:1"], b=None)
        await looked_twice(pools)
        assert gone in pools.upstreams
        has.update(b=["b:1"])
        await looked_twice(pools)
        assert [upstream.target for upstream in pools.upstreams] == ["a:1", "b:1"]
        assert not client.closed  # a stream is there
    await looked_twice(pools)
    assert client.closed
    await pools.close()
    assert all(connection.closed for connection in name.dialled)


async def looked_twice(pools: Pools) -> None:
    """Names are asked before pools are, so what they say has come by then."""
    await pools.looked()
    await pools.looked()
