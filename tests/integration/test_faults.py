"""Every kind of process, killed and frozen, in every phase: nobody hangs and everybody says why.

Ranks are threads of this process, their data plane a hub. A process that is *killed* loses its
port, its connections and its place on the data plane at once. One that is *frozen* here is one
whose engine stands still while its port answers, which is harder to notice than a process that is
stopped (`test_faults_processes.py`): peers on the data plane time out, and a stall is found on a
clock that the test turns. A coordinator would stand still together with the test, so that one is a
process of its own, and is stopped. The table's phase of loading is in `test_faults_processes.py`.

What must hold after each: every open request ends with an error that names a cause, the others that
need the lost process fail within their time-outs, and the pages of ended requests are free. One
file: each test is a few lines on the scene that all of them share.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tknp.client import Client, RequestFailed, request_for
from tknp.config import write_pool
from tknp.errors import TknpError
from tknp.kv.holding import State
from tknp.kv.pages import PagePool
from tknp.local import InProcessPool
from tknp.node.server import NodeServer
from tknp.prefill.server import PrefillServer
from tknp.v1.common_pb2 import Phase, Sampling

PROMPT = list(range(1, 100))
TIMEOUT_S = 2.0  # of the data plane: above what a busy machine may hold up a rank
NOTICED_S = 10.0
SETTINGS: dict[str, Any] = {
    "nodes": 2, "kv_memory_bytes": 2 << 20, "page_size": 16, "timeout_s": TIMEOUT_S,
    "prefill_chunk": 32, "kv_transfer": "grpc",
}  # fmt: skip
pytestmark = [pytest.mark.alone, pytest.mark.timeout(120)]


class Clock:
    """Real time plus what the test adds to it."""

    def __init__(self) -> None:
        self.skipped_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.skipped_s


class Block:
    """Holds up the thread that comes to it. `reached` is set on the event loop."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go_on = threading.Event()

    def __call__(self, *_: Any) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        self._go_on.wait()

    def release(self) -> None:
        self._go_on.set()


class Scene:
    """A running pool with one open request, and the means to break it."""

    def __init__(self, pool: Any) -> None:
        self.clock = Clock()
        self.pool = pool
        self.running = InProcessPool(pool, self.clock)
        self.blocks: list[Block] = []
        self.tokens = 0
        self.got_tokens = asyncio.Event()
        self.killed: list[Any] = []

    @property
    def driver(self) -> Any:
        return self.running.coordinator.driver

    def block(self) -> Block:
        self.blocks.append(Block())
        return self.blocks[-1]

    async def generate(self, client: Client, max_tokens: int = 200) -> None:
        """One request; raises what ends it."""
        sampling = Sampling(max_tokens=max_tokens, ignore_eos=True)
        async for response in client.generate(request_for(PROMPT, sampling)):
            self.tokens += len(response.token_ids)
            if self.tokens:
                self.got_tokens.set()

    async def kill(self, service: NodeServer | PrefillServer | Any) -> None:
        """What peers see of a process that is killed."""
        self.killed.append(service)
        runtime = getattr(service, "runtime", None)
        owner = runtime.rank if isinstance(service, PrefillServer) else runtime
        transport = getattr(owner, "_transport", None)
        if transport is not None:
            transport.abort("its process has died")
        await service._server.grpc.stop(None)

    def freeze(self, service: NodeServer | PrefillServer) -> Block:
        """Let nothing more run on the engine of `service`."""
        block = self.block()
        thread = (
            service.runtime._thread
            if isinstance(service, NodeServer)
            else service.runtime.rank._thread  # type: ignore[union-attr]
        )
        thread.submit(block)
        return block

    async def pages_return(self, *nodes: NodeServer) -> None:
        """Wait until no page of `nodes` is held by anybody."""
        for node in nodes:
            books = node.runtime.books
            assert books is not None
            await until(partial(_all_free, books))
            books.check_integrity()


@pytest.fixture
def scene(make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]) -> Any:
    """`async with scene(**settings) as (scene, client)`: a pool that is ready."""

    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[tuple[Scene, Client]]:
        scene = Scene(make_pool(random_checkpoint(), **{**SETTINGS, **settings}))
        try:
            async with scene.running, Client(scene.pool.config.coordinator) as client:
                try:
                    yield scene, client
                finally:
                    for block in scene.blocks:
                        block.release()
        finally:
            for block in scene.blocks:
                block.release()

    return start


def _all_free(books: PagePool) -> bool:
    return books.counts()[State.FREE] == books.pages - 1


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another task; pytest's own limit ends a wait in vain."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.01)


async def refused(work: asyncio.Task[None], why: str | None = None) -> None:
    """`work` ends with an error that `why`, a pattern, is found in."""
    with pytest.raises((RequestFailed, TknpError), match=why):
        await asyncio.wait_for(work, NOTICED_S)


async def failed(scene: Scene, why: str) -> None:
    """The pool fails with a reason that `why`, a pattern, is found in."""
    await asyncio.wait_for(scene.driver.failed.wait(), NOTICED_S)
    assert re.search(why, scene.driver.error), scene.driver.error


# ---------------------------------------------------------------- decode nodes


@pytest.mark.parametrize("node", [0, 1])
async def test_decode_node_killed_while_decoding(scene: Any, node: int) -> None:
    """Its peer may notice first, by the data plane, or the coordinator, by the step stream."""
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.kill(pool.running.nodes[node])
        why = rf"rank \({node}, 0\)|decode node {node}"
        await refused(work, why)
        await failed(pool, why)
        await refused(asyncio.create_task(pool.generate(client)), why)
        survivor = pool.running.nodes[1 - node].runtime
        async with asyncio.timeout(NOTICED_S):
            assert await survivor.life.failed()


async def test_decode_node_killed_while_idle(scene: Any) -> None:
    async with scene() as (pool, client):
        await pool.kill(pool.running.nodes[1])
        await failed(pool, "decode node 1")
        await refused(asyncio.create_task(pool.generate(client)), "decode node 1")


@pytest.mark.parametrize("node", [0, 1])
async def test_decode_node_frozen_while_decoding(scene: Any, node: int) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        pool.freeze(pool.running.nodes[node])
        await refused(work, rf"\({node}, 0\) not done after 2.0 s")
        await failed(pool, rf"\({node}, 0\) not done")


async def test_decode_node_frozen_while_idle_is_noticed_by_the_next_request(scene: Any) -> None:
    async with scene() as (pool, client):
        await pool.freeze(pool.running.nodes[1]).reached.wait()
        await refused(asyncio.create_task(pool.generate(client)), "not done after 2.0 s")
        await failed(pool, r"\(1, 0\)")


async def test_the_only_decode_node_frozen_is_found_by_its_own_clock(scene: Any) -> None:
    """No peer waits for it on the data plane, and its port answers: only progress tells."""
    async with scene(nodes=1) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.freeze(pool.running.nodes[0]).reached.wait()
        node = pool.running.nodes[0]
        await node.look()
        pool.clock.skipped_s += 100
        await node.look()
        assert "no progress" in node.runtime.life.error
        await pool.driver.look()
        await failed(pool, "hangs")
        await refused(work, "hangs")


async def test_a_tp_rank_killed_while_decoding(scene: Any) -> None:
    async with scene(nodes=1, tp=2) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.kill(pool.running.nodes[1])
        await refused(work, r"rank \(0, 1\)|TP rank 1|decode node 0")
        await failed(pool, r"rank \(0, 1\)|TP rank 1|decode node 0")


@pytest.mark.full
async def test_a_tp_rank_frozen_while_decoding(scene: Any) -> None:
    async with scene(nodes=1, tp=2) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        pool.freeze(pool.running.nodes[1])
        await refused(work, "not done after 2.0 s")


async def test_decode_node_killed_while_draining(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        draining = asyncio.create_task(pool.running.coordinator.drain())
        await until(lambda: pool.driver.phase == Phase.PHASE_DRAINING)
        await pool.kill(pool.running.nodes[1])
        await refused(work, r"rank \(1, 0\)|decode node 1")
        async with asyncio.timeout(NOTICED_S):
            await draining


@pytest.mark.full
async def test_decode_node_frozen_while_draining(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        draining = asyncio.create_task(pool.running.coordinator.drain())
        pool.freeze(pool.running.nodes[1])
        await refused(work, "not done after 2.0 s")
        async with asyncio.timeout(NOTICED_S):
            await draining


# ---------------------------------------------------------------- prefill


def in_layer(service: PrefillServer, block: Block) -> None:
    """`block` at the next attention layer of `service`: a prompt is being computed."""
    assert service.runtime.rank is not None
    attention = service.runtime.rank._attention
    attend = attention.attend

    def blocked(*arguments: Any) -> Any:
        block()
        return attend(*arguments)

    attention.attend = blocked  # type: ignore[method-assign]


def in_finish(service: PrefillServer, reached: asyncio.Event, go_on: asyncio.Event) -> None:
    """Hold up `service` when all is computed and the owners do not have it all yet."""
    requests = service.runtime.requests
    assert requests is not None
    finish = requests.finish

    async def held(key: Any) -> int:
        reached.set()
        await go_on.wait()
        return await finish(key)

    requests.finish = held  # type: ignore[method-assign]


async def test_prefill_killed_in_a_prompt_ends_that_request_and_frees_its_pages(scene: Any) -> None:
    async with scene() as (pool, client):
        block = pool.block()
        in_layer(pool.running.prefill[0], block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        await pool.kill(pool.running.prefill[0])
        block.release()
        await refused(work, "prefill 0")
        assert not pool.driver.error
        await pool.pages_return(*pool.running.nodes)
        await refused(asyncio.create_task(pool.generate(client)), "prefill 0")


async def test_prefill_killed_in_a_transfer_frees_the_owner_s_pages(scene: Any) -> None:
    async with scene() as (pool, client):
        reached, go_on = asyncio.Event(), asyncio.Event()
        in_finish(pool.running.prefill[0], reached, go_on)
        work = asyncio.create_task(pool.generate(client))
        await reached.wait()
        await pool.kill(pool.running.prefill[0])
        await refused(work, "prefill 0")
        go_on.set()
        await pool.pages_return(*pool.running.nodes)


async def test_prefill_killed_while_idle_leaves_running_requests_alone(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        await pool.kill(pool.running.prefill[0])
        await work
        assert not pool.driver.error


async def test_prefill_frozen_in_a_prompt_is_found_by_its_own_clock(scene: Any) -> None:
    async with scene() as (pool, client):
        prefill = pool.running.prefill[0]
        block = pool.block()
        in_layer(prefill, block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        await prefill.look()
        pool.clock.skipped_s += 100
        await prefill.look()
        assert "no progress" in prefill.runtime.life.error
        await pool.kill(prefill)  # as its process does, having failed
        await refused(work, "prefill 0")
        block.release()
        await pool.pages_return(*pool.running.nodes)


async def test_a_prefill_tp_rank_killed_ends_the_replica(scene: Any) -> None:
    async with scene(prefill_tp=2) as (pool, client):
        block = pool.block()
        in_layer(pool.running.prefill[0], block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        await pool.kill(pool.running.prefill[1])
        leader = pool.running.prefill[0].runtime
        assert "TP rank" in await leader.life.failed()
        block.release()
        await refused(work)
        await pool.pages_return(*pool.running.nodes)


@pytest.mark.full
async def test_a_prefill_tp_rank_frozen_ends_the_replica(scene: Any) -> None:
    async with scene(prefill_tp=2) as (pool, client):
        pool.freeze(pool.running.prefill[1])
        await refused(asyncio.create_task(pool.generate(client)), "not done after 2.0 s")
        assert "not done after 2.0 s" in await pool.running.prefill[0].runtime.life.failed()


# ---------------------------------------------------------------- coordinator


async def test_coordinator_killed_while_decoding_ends_streams_and_nodes(scene: Any) -> None:
    async with scene() as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        pool.driver.serving.close()  # its connections to the nodes
        await pool.kill(pool.running.coordinator)
        await refused(work)
        for node in pool.running.nodes:
            async with asyncio.timeout(NOTICED_S):
                assert "coordinator" in await node.runtime.life.failed()


async def test_coordinator_killed_in_a_prompt_leaves_no_page_taken(scene: Any) -> None:
    async with scene() as (pool, client):
        block = pool.block()
        in_layer(pool.running.prefill[0], block)
        work = asyncio.create_task(pool.generate(client))
        await block.reached.wait()
        pool.driver.serving.close()
        await pool.kill(pool.running.coordinator)
        await pool.driver.peers.close()
        block.release()
        await refused(work)
        pool.clock.skipped_s += pool.pool.config.lease_s + 1
        await pool.pages_return(*pool.running.nodes)


# ---------------------------------------------------------------- loading


async def test_a_rank_that_cannot_load_fails_the_start_with_its_reason(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> None:
    pool = make_pool(random_checkpoint(), nodes=2, kv_memory_bytes=1 << 50, page_size=16)
    with pytest.raises(TknpError, match=r"KV pages need \d+ bytes .* \d+ bytes .* available"):
        async with InProcessPool(pool):
            pass


async def test_a_chunk_that_finds_no_memory_ends_its_request_with_numbers(scene: Any) -> None:
    """As it is computed, a prompt takes memory that nobody has counted."""
    async with scene(nodes=1) as (pool, client):
        attention = pool.running.prefill[0].runtime.rank._attention
        attention.attend = too_much
        why = r"no memory to compute a chunk of 32 tokens, \d+ bytes .* 1152921504606846976"
        await refused(asyncio.create_task(pool.generate(client)), why)
        del attention.attend
        await pool.generate(client, max_tokens=3)
        assert not pool.driver.error


async def test_a_step_that_finds_no_memory_ends_the_pool_with_the_reason(scene: Any) -> None:
    async with scene(nodes=1) as (pool, client):
        work = asyncio.create_task(pool.generate(client))
        await pool.got_tokens.wait()
        state = pool.running.nodes[0].runtime._engine._lanes[0].state
        state._attention.attend = too_much
        await refused(work, r"rank \(0, 0\), step \d+: .*1152921504606846976 bytes")
        await failed(pool, "1152921504606846976 bytes")


def too_much(*_: Any) -> None:
    """What no machine has."""
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize("kind", ["nodes", "prefill"])
async def test_a_process_killed_while_loading_fails_the_start(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path], kind: str
) -> None:
    """Its port was open once, and is not any more."""
    pool = make_pool(random_checkpoint(), nodes=2, kv_memory_bytes=2 << 20, page_size=16)
    clock = Clock()
    running = InProcessPool(pool, clock)
    victim = getattr(running, kind)[-1]
    never = threading.Event()
    victim.runtime._connect = lambda *_: never.wait()
    start = asyncio.create_task(running.__aenter__())
    peers = running.coordinator.driver.peers
    peer = (peers.nodes[-1] if kind == "nodes" else peers.prefill[-1])[0]
    try:
        await until(lambda: peer.progress.phase == Phase.PHASE_JOINING)
        await victim._server.grpc.stop(None)
        await until(lambda: bool(peer.lost))
        clock.skipped_s += 100
        with pytest.raises(TknpError, match=rf"{peer.name}.*has not answered"):
            async with asyncio.timeout(NOTICED_S):
                await start
    finally:
        never.set()
        start.cancel()
        with suppress(BaseException):
            await start


# ---------------------------------------------------------------- the whole table

KINDS = ("coordinator", "prefill", "decode node", "decode TP rank", "prefill TP rank")
PHASES = ("idle", "prefill", "transfer", "decode", "draining")
CELLS = [
    pytest.param(kind, how, phase, marks=pytest.mark.full, id=f"{kind}-{how}-{phase}")
    for kind in KINDS
    for how in ("killed", "frozen")
    for phase in PHASES
    if (kind, how) != ("coordinator", "frozen")  # in a test of its own
]


async def enter(scene: Scene, phase: str, client: Client) -> asyncio.Task[None]:
    """Bring a request of `scene` into `phase`, the batch if that is draining."""
    prefill = scene.running.prefill[0]
    block, reached, go_on = scene.block(), asyncio.Event(), asyncio.Event()
    if phase == "idle":
        return asyncio.create_task(asyncio.sleep(0))
    if phase == "prefill":
        in_layer(prefill, block)
    if phase == "transfer":
        in_finish(prefill, reached, go_on)
    work = asyncio.create_task(scene.generate(client, max_tokens=400))
    waits = {"prefill": block.reached, "transfer": reached}
    await waits.get(phase, scene.got_tokens).wait()
    # What is held up goes on by itself a moment after: the process that was hit must not matter.
    asyncio.get_running_loop().call_later(0.2, block.release)
    asyncio.get_running_loop().call_later(0.2, go_on.set)
    return work


async def look_around(scene: Scene) -> None:
    """What passes while time does: looks are taken, and processes that have failed end."""
    scene.clock.skipped_s += 4 * scene.pool.config.timeout_s
    for service in (*scene.running.nodes, *scene.running.prefill):
        if service not in scene.killed:
            await service.look()
            if service.runtime.life.error:
                await scene.kill(service)
    if scene.running.coordinator not in scene.killed:
        await scene.driver.look()


@pytest.mark.parametrize(("kind", "how", "phase"), CELLS)
async def test_table(scene: Any, kind: str, how: str, phase: str) -> None:
    """Whatever is hit, and when: every request ends, the pool ends or its pages are free."""
    settings = {"tp": 1 + (kind == "decode TP rank"), "prefill_tp": 1 + (kind == "prefill TP rank")}
    async with scene(nodes=2, **settings) as (pool, client):
        victim: Any = {
            "coordinator": pool.running.coordinator,
            "prefill": pool.running.prefill[0],
            "decode node": pool.running.nodes[-1],
            "decode TP rank": pool.running.nodes[-1],
            "prefill TP rank": pool.running.prefill[-1],
        }[kind]
        work, others = await enter(pool, phase, client), []
        if phase == "draining":
            others.append(asyncio.create_task(pool.running.coordinator.drain()))
            await until(lambda: pool.driver.phase == Phase.PHASE_DRAINING)
        if kind == "coordinator":
            pool.driver.serving.close()
        if how == "killed":
            await pool.kill(victim)
        else:
            pool.freeze(victim)
        if kind == "coordinator":
            await pool.driver.peers.close()
        if phase == "idle":
            work = asyncio.create_task(pool.generate(client, max_tokens=400))
        async with asyncio.timeout(3 * NOTICED_S):
            while not work.done():
                await asyncio.wait([work], timeout=0.5)
                await look_around(pool)
            await asyncio.gather(*others)
        error = work.exception()
        assert error is None or isinstance(error, RequestFailed | TknpError)
        assert error is not None or kind.startswith("prefill"), "the pool can't go on without it"
        computing = phase in ("idle", "prefill") or (phase == "transfer" and how == "killed")
        if kind.startswith("prefill") and computing:
            assert error is not None
            assert not pool.driver.error
        if not pool.driver.error and kind != "coordinator":
            await pool.pages_return(*pool.running.nodes[:: settings["tp"]])


@pytest.mark.full
@pytest.mark.parametrize("phase", PHASES)
async def test_table_of_a_coordinator_that_is_stopped(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path], tmp_path: Path,
    phase: str,
) -> None:  # fmt: skip
    """Requests end within the keepalive's time; nodes that run some end too, pages come back."""
    scene = Scene(make_pool(random_checkpoint(), **SETTINGS))
    write_pool(scene.pool.config, tmp_path / "pool.yaml")
    command = ("-m", "tknp.cli.main", "serve", "coordinator", "--pool", tmp_path / "pool.yaml")
    coordinator = await asyncio.create_subprocess_exec(sys.executable, *command)
    try:
        for rank in (*scene.running.prefill, *scene.running.nodes):
            await rank.start()
        async with Client(scene.pool.config.coordinator) as client:
            await served(client)
            work = await enter(scene, phase, client)
            if phase == "draining":
                coordinator.send_signal(signal.SIGTERM)
                while (await client.status()).phase != Phase.PHASE_DRAINING:
                    pass
            coordinator.send_signal(signal.SIGSTOP)
            if phase == "idle":
                work = asyncio.create_task(scene.generate(client))
            await refused(work)
        nodes = scene.running.nodes
        if phase in ("decode", "draining"):
            for node in nodes:
                async with asyncio.timeout(NOTICED_S):
                    assert "coordinator" in await node.runtime.life.failed()
        else:
            scene.clock.skipped_s += scene.pool.config.lease_s + 1
            await scene.pages_return(*nodes)
    finally:
        for block in scene.blocks:
            block.release()
        coordinator.kill()
        await coordinator.wait()
        await scene.running.stop()


async def served(client: Client) -> None:
    """Wait until the pool is ready."""
    while True:
        with suppress(TknpError):
            if (await client.status()).ready:
                return
        await asyncio.sleep(0.1)
