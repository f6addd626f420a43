"""Complaints about engines, held against pools."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tknp.client import Client, RequestFailed, request_for
from tknp.coordinator import scheduler
from tknp.engine.batch import Batch, Delta
from tknp.errors import ProtocolError, TknpError, Unavailable
from tknp.kv.holding import Key, State
from tknp.local import InProcessPool
from tknp.rpc.channel import LIVENESS
from tknp.rpc.ids import unpack_ids
from tknp.v1.common_pb2 import FinishReason, Sampling

PAGE = 16
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


async def generate(
    client: Client, prompt: Sequence[int], max_tokens: int = 8, **fields: Any
) -> list[int]:
    sampling = Sampling(max_tokens=max_tokens, ignore_eos=True, **fields)
    ids: list[int] = []
    async for response in client.generate(request_for(prompt, sampling)):
        ids += unpack_ids("token_ids", response.token_ids)
    return ids


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(7 * i + 13 * seed + 1) % 250 for i in range(length)]


async def pages_return(pool: InProcessPool) -> None:
    """Wait until nobody holds a page."""
    for node in pool.nodes:
        books = node.runtime.books
        assert books is not None
        while True:
            if books.counts()[State.FREE] == books.pages - 1:
                break
            await asyncio.sleep(0.01)
        books.check_integrity()


@pytest.mark.parametrize(("seam", "why"), [("room", "is unknown here"), ("finish", "has ended")])
async def test_03_reject_by_the_owner_leaves_nothing_at_prefill(
    pool: InProcessPool, client: Client, seam: str, why: str
) -> None:
    """The owner has given the request up by the time that its transfer begins, or is complete."""
    requests = pool.prefill[0].runtime.requests
    assert requests is not None
    proceed = getattr(requests, seam)

    async def given_up(*values: Any) -> Any:
        for node in pool.nodes:
            assert node.runtime.books is not None
            for holding in node.runtime.books.holdings():
                node.runtime.books.release(holding.key)
        return await proceed(*values)

    setattr(requests, seam, given_up)
    try:
        with pytest.raises(RequestFailed, match=why):
            await generate(client, prompt(40))
    finally:
        delattr(requests, seam)
    assert len(requests) == 0
    await requests.room(160)  # its own pages are free too
    await pages_return(pool)


async def test_05_garbage_never_follows_a_transfer_that_failed(
    pool: InProcessPool, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the id that every service logs beside the one that the client gave."""
    requests = pool.prefill[0].runtime.requests
    assert requests is not None

    async def broken(key: Key) -> int:
        raise Unavailable("the network is cut")

    requests.finish = broken  # type: ignore[method-assign]
    named = request_for(prompt(40), request_id="mine\n")
    try:
        with pytest.raises(RequestFailed, match="the network is cut"):
            _ = [response async for response in client.generate(named)]
    finally:
        del requests.finish  # type: ignore[method-assign]
    said = r"request [0-9a-f]{32}/\d \('mine\\n' of its client\) failed: .*the network is cut"
    assert re.search(said, caplog.text)
    await pages_return(pool)
    assert len(requests) == 0
    assert len(await generate(client, prompt(40))) == 8


@pytest.mark.alone
async def test_06_abort_of_a_request_reaches_prefill_and_owner_at_once(
    pool: InProcessPool, client: Client
) -> None:
    """The lease of 30 s is not what ends it: nothing here waits for one."""
    requests = pool.prefill[0].runtime.requests
    assert requests is not None
    finish, reached = requests.finish, asyncio.Event()

    async def held(key: Key) -> int:
        reached.set()
        await asyncio.Event().wait()
        return await finish(key)

    requests.finish = held  # type: ignore[method-assign]
    try:
        work = asyncio.create_task(generate(client, prompt(40)))
        await reached.wait()
        work.cancel()
        async with asyncio.timeout(10):
            await pages_return(pool)
            while True:
                if not len(requests):
                    break
                await asyncio.sleep(0.01)
    finally:
        del requests.finish  # type: ignore[method-assign]


async def test_08_impossible_requests_are_refused_and_the_next_goes_on(
    pool: InProcessPool, client: Client
) -> None:
    """160 tokens fit on a node, 320 in the pool, where a request has one owner."""
    with pytest.raises(RequestFailed, match=r"max_tokens=100: at most 60 after a prompt"):
        await generate(client, prompt(100), max_tokens=100)
    assert len(await generate(client, prompt(100), max_tokens=60)) == 60


async def test_09_divergence_of_ranks_is_an_error_before_anything_changes(
    pool: InProcessPool,
) -> None:
    batch = Batch(epoch=1, layout=pool.coordinator.driver.pool.layout, max_rows=4)
    batch.apply(Delta(1, 0, 0))
    for wrong in (Delta(2, 0, 1), Delta(1, 1, 1), Delta(1, 0, 0), Delta(1, 0, 2)):
        with pytest.raises(ProtocolError, match=r"\(epoch, stream, step\)"):
            batch.apply(wrong)
    assert batch.next_step == 1


async def test_10_idle_ranks_run_every_step(pool: InProcessPool, client: Client) -> None:
    """One request: its node's peer has no rows, and takes part all the same."""
    serving = pool.coordinator.driver.serving
    assert serving is not None

    async def stepped() -> int:
        """Steps that every rank has run, once all that were launched are over."""
        async with asyncio.timeout(60):
            # Nothing tells when a rank has stepped.
            while {node.runtime.stepped for node in pool.nodes} != {serving.scheduler.steps}:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return serving.scheduler.steps

    before = await stepped()
    await generate(client, prompt(5), max_tokens=12)
    assert await stepped() - before >= 11


async def test_11_hung_is_not_healthy(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path], clock: Any
) -> None:
    """Liveness is progress while work is pending, readiness that the first step has run."""
    config = make_pool(random_checkpoint(), nodes=1, page_size=PAGE, kv_memory_bytes=1 << 20)
    async with InProcessPool(config, clock) as running:
        node = running.nodes[0]
        async with aio.insecure_channel(config.config.nodes[0].addresses[0]) as channel:
            health = health_pb2_grpc.HealthStub(channel)

            async def check(service: str) -> int:
                asked = health_pb2.HealthCheckRequest(service=service)
                return int((await health.Check(asked)).status)

            serving = health_pb2.HealthCheckResponse.SERVING
            while await check("") != serving:
                continue
            node.runtime.submitted += 1  # a step that never ends
            await node.look()
            clock.now_s += 1000
            assert await check(LIVENESS) == serving
            await node.look()
            assert await check(LIVENESS) == health_pb2.HealthCheckResponse.NOT_SERVING
            assert "no progress for 1000 s" in node.runtime.life.error


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
async def test_12_parity_of_two_nodes_with_one_at_the_edges(
    pool: InProcessPool, client: Client, one_rank: Client, length: int
) -> None:
    expected = await generate(one_rank, prompt(length), max_tokens=PAGE + 2)
    assert await generate(client, prompt(length), max_tokens=PAGE + 2) == expected


@pytest.mark.parametrize(
    ("tp", "prefill_tp", "settings"),
    [
        (1, 2, {}),
        (2, 1, {"strategy": "dcp", "interleave": 4}),
        pytest.param(4, 2, {}, marks=pytest.mark.full),
        pytest.param(1, 1, {"strategy": "helix", "interleave": 4}, marks=pytest.mark.full),
    ],
)
async def test_12_parity_of_other_degrees_and_cut_sequences(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path], one_rank: Client,
    tp: int, prefill_tp: int, settings: dict[str, Any],
) -> None:  # fmt: skip
    """Prompts shorter than the number of shards, outputs that end at a turn and beside one."""
    config = make_pool(
        random_checkpoint(), nodes=2, tp=tp, prefill_tp=prefill_tp, page_size=PAGE,
        kv_memory_bytes=1 << 20, kv_transfer="grpc", **settings,
    )  # fmt: skip
    cases = [(length, tokens) for length in (1, 5) for tokens in (3, 4, 5, 9)]
    async with InProcessPool(config), Client(config.config.coordinator) as pool:
        for length, tokens in cases:
            expected = await generate(one_rank, prompt(length), tokens)
            assert await generate(pool, prompt(length), tokens) == expected


async def test_13_padding_what_the_dummy_page_holds_reaches_nobody(
    pool: InProcessPool, client: Client
) -> None:
    expected = await generate(client, prompt(20))
    for node in pool.nodes:
        assert node.runtime.storage is not None
        node.runtime.storage.data[:, :, 0] = 1e4
    assert await generate(client, prompt(20)) == expected


@pytest.mark.parametrize("in_flight", [1, scheduler.STEPS_IN_FLIGHT])
async def test_14_overlap_requests_that_come_and_go_get_what_they_get_alone(
    pool: InProcessPool, client: Client, in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are launched before the tokens of the last are known, ends by token among them.

    One step in flight is no overlap: what each request gets then, alone, is what it has to get.
    """
    cases = [(prompt(3 + 11 * i, i), 1 + 3 * (i % 5)) for i in range(10)]
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "STEPS_IN_FLIGHT", 1)
        alone = [await generate(client, p, n) for p, n in cases]
    monkeypatch.setattr(scheduler, "STEPS_IN_FLIGHT", in_flight)
    stops = [ids[len(ids) // 2] for ids in alone]
    together = await asyncio.gather(
        *(
            generate(client, p, n, stop_token_ids=[stop] if i % 2 else [])
            for i, ((p, n), stop) in enumerate(zip(cases, stops, strict=True))
        )
    )
    for i, (ids, expected, stop) in enumerate(zip(together, alone, stops, strict=True)):
        assert ids == (expected[: expected.index(stop) + 1] if i % 2 else expected)
    await pages_return(pool)


async def test_16_context_end_is_refused_when_asked_for_and_kept_to_when_not(
    pool: InProcessPool, client: Client
) -> None:
    with pytest.raises(RequestFailed, match=r"prompt='160 tokens'") as refused:
        await generate(client, prompt(160), max_tokens=1)
    assert refused.value.code == "INVALID_ARGUMENT"
    responses = [
        response
        async for response in client.generate(request_for(prompt(150), Sampling(ignore_eos=True)))
    ]
    finish = responses[-1].finish
    assert (finish.reason, finish.completion_tokens) == (FinishReason.FINISH_REASON_LENGTH, 10)


async def test_17_bad_requests_end_alone(pool: InProcessPool, client: Client) -> None:
    """Among them two with one id, which is the client's to repeat."""
    bad = [
        request_for([999_999]),
        request_for([]),
        request_for([1], Sampling(temperature=-1)),
        request_for([1], Sampling(max_tokens=4, logit_bias={999_999: 1.0})),
    ]

    async def outcome(request: Any) -> str:
        try:
            return "done" if [r async for r in client.generate(request)][-1].finish else "open"
        except (RequestFailed, TknpError):
            return "refused"

    good = [request_for(prompt(9), Sampling(max_tokens=5), request_id="same") for _ in range(2)]
    outcomes = await asyncio.gather(*map(outcome, [*bad, *good]))
    assert outcomes == ["refused"] * len(bad) + ["done", "done"]
    assert not pool.coordinator.driver.error


async def test_18_output_at_temperature_zero_does_not_vary_with_the_batch(
    pool: InProcessPool, client: Client
) -> None:
    """Tokens in float32; the compiled bfloat16 kernels are equal to the bit (tests of kernels)."""

    async def outcome(ids: list[int]) -> tuple[list[int], list[float]]:
        sampling = Sampling(max_tokens=6, ignore_eos=True, logprobs=0)
        tokens: list[int] = []
        logprobs: list[float] = []
        async for response in client.generate(request_for(ids, sampling)):
            tokens += unpack_ids("token_ids", response.token_ids)
            logprobs += [entry.chosen for entry in response.logprobs]
        return tokens, logprobs

    prompts = [prompt(4 + 7 * i, i) for i in range(6)]
    alone = [await outcome(ids) for ids in prompts]
    together = await asyncio.gather(*map(outcome, prompts))
    for (tokens, logprobs), (expected, expected_logprobs) in zip(together, alone, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
        assert len(tokens) == len(logprobs) == 6
