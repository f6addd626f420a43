"""Requests over several owners and streams: the ids are those of a pool of one node.

Every pool is small enough that requests wait, and large ones need more than one node has.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tknp.client import Client, Completion, RequestFailed, request_for
from tknp.local import InProcessPool
from tknp.rpc.ids import pack_ids
from tknp.v1.common_pb2 import Sampling

Job = tuple[Sequence[int], int]
PAGE_SIZE = 16
TOKEN_BYTES = 4 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32
SHAPE = {"layers": 4, "q_heads": 4, "kv_heads": 2, "intermediate": 96}


def kv(tokens: int) -> int:
    """Bytes of a node that holds `tokens` beside the dummy page."""
    return (tokens + PAGE_SIZE) * TOKEN_BYTES


def sampling(tokens: int, **values: Any) -> Sampling:
    return Sampling(max_tokens=tokens, ignore_eos=True, **values)


async def run(target: str, jobs: Sequence[Job], **values: Any) -> list[Completion]:
    """All jobs at once; `values` go to each Sampling, job i with seed i."""
    async with Client(target) as client:

        async def one(seed: int, prompt: Sequence[int], tokens: int) -> Completion:
            completion = Completion(0.0)
            request = request_for(prompt, sampling(tokens, seed=seed, **values))
            async for response in client.generate(request):
                completion.add(response, 0.0)
            return completion

        return await asyncio.gather(*(one(i, *job) for i, job in enumerate(jobs)))


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Lengths around pages and turns, uneven outputs."""
    dice = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 31, 33, 48, 64, 90]
    return [([dice.randrange(256) for _ in range(n)], dice.randint(2, 40)) for n in lengths]


@pytest.fixture(scope="module")
def checkpoint(random_checkpoint: Callable[..., Path]) -> Path:
    return random_checkpoint(**SHAPE)


@pytest.fixture(scope="module")
def pool_of(make_pool: Callable[..., Any], checkpoint: Path) -> Callable[..., Any]:
    def make(nodes: int, node_tokens: int, **values: Any) -> Any:
        return make_pool(
            checkpoint, nodes=nodes, page_size=PAGE_SIZE, prefill_chunk=24, kv_transfer="grpc",
            kv_memory_bytes=kv(node_tokens), **values,
        )  # fmt: skip

    return make


@pytest.fixture(scope="module")
def expected(pool_of: Callable[..., Any]) -> Callable[..., list[list[int]]]:
    """Ids from a pool of one node with room for everything."""
    known: dict[str, list[list[int]]] = {}

    def ids(jobs: Sequence[Job], **values: Any) -> list[list[int]]:
        key = repr((jobs, values))
        if key not in known:

            async def alone() -> list[list[int]]:
                pool = pool_of(1, 2000)
                async with InProcessPool(pool):
                    found = await run(pool.config.coordinator, jobs, **values)
                return [completion.token_ids for completion in found]

            known[key] = asyncio.run(alone())
        return known[key]

    return ids


async def no_page_is_left(running: InProcessPool) -> None:
    """Once the last requests are through, as status tells, every page is free."""
    async with Client(running.coordinator.driver.pool.config.coordinator) as client:
        async with asyncio.timeout(60):
            while any(node.used_pages for node in (await client.status()).nodes):
                pass
    for node in running.nodes:
        books = node.runtime.books
        if books is not None:
            books.check_integrity()
            assert books.free_tokens == books.total_tokens


@pytest.mark.parametrize(
    ("nodes", "values"),
    [
        (2, {"width": 2, "interleave": 4}),
        (2, {"copies": 2}),
        (4, {"microbatches": 2, "width": 2, "interleave": 1}),
        (2, {"strategy": "pp"}),
        (2, {"strategy": "helix", "overlap": 3}),
        (2, {"strategy": "dcp"}),
        # Every suite runs the first in tests/parity/test_wide.py, the others below.
        pytest.param(3, {"interleave": 16}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "dp"}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "pp", "microbatches": 1}, marks=pytest.mark.full),
        pytest.param(2, {"strategy": "helix", "interleave": 4}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_ids_are_those_of_one_node(
    nodes: int,
    values: dict[str, Any],
    jobs: list[Job],
    pool_of: Callable[..., Any],
    expected: Callable[..., list[list[int]]],
) -> None:
    reference = expected(jobs)

    async def serve() -> list[Completion]:
        pool = pool_of(nodes, 160, **values)
        async with InProcessPool(pool) as running:
            found = await run(pool.config.coordinator, jobs)
            await no_page_is_left(running)
        return found

    found = asyncio.run(serve())
    assert [completion.token_ids for completion in found] == reference


def test_a_prompt_longer_than_a_node_is_served_beside_short_ones(
    pool_of: Callable[..., Any], expected: Callable[..., list[list[int]]]
) -> None:
    """1.6 times what a node holds; the error for one too long names the pool's limit."""
    dice = random.Random(7)
    node_tokens = 160
    long = ([dice.randrange(256) for _ in range(int(1.6 * node_tokens))], 20)
    jobs = [long] + [([dice.randrange(256) for _ in range(n)], 12) for n in range(1, 21)]
    reference = expected(jobs)

    async def serve() -> tuple[list[Completion], int]:
        pool = pool_of(2, node_tokens)
        async with InProcessPool(pool) as running:
            found = await run(pool.config.coordinator, jobs)
            async with Client(pool.config.coordinator) as client:
                longest = (await client.model()).max_model_len
            await no_page_is_left(running)
        return found, longest

    found, longest = asyncio.run(serve())
    assert [completion.token_ids for completion in found] == reference
    assert [sorted(c.finish.owners) for c in found[:1]] == [[0, 1]]
    assert all(len(c.finish.owners) == 1 for c in found[1:])
    assert longest > 1.8 * node_tokens


@pytest.mark.parametrize(
    "values",
    [
        {"width": 1},
        {"width": 3, "interleave": 4},
        {"strategy": "dp"},
        {"strategy": "helix", "interleave": 4, "nodes": 2},
        {"strategy": "pp", "microbatches": 1},
    ],
    ids=str,
)
def test_requests_that_outgrow_their_pages_go_on(
    values: dict[str, Any],
    pool_of: Callable[..., Any],
    expected: Callable[..., list[list[int]]],
) -> None:
    """Random draws with penalties: a request that is computed again must draw what it would have.

    Prompts fit side by side, prompts and outputs do not.
    """
    dice = random.Random(11)
    jobs = [([dice.randrange(256) for _ in range(n)], 60) for n in (5, 14, 17, 20, 9, 30)]
    hot = {"temperature": 0.9, "presence_penalty": 0.7}
    reference = expected(jobs, **hot)
    nodes = values.get("nodes", 3)
    settings = {name: value for name, value in values.items() if name != "nodes"}

    async def serve() -> tuple[list[Completion], int]:
        pool = pool_of(nodes, 96, reserve_ratio=0.0, **settings)
        async with InProcessPool(pool) as running:
            found = await run(pool.config.coordinator, jobs, **hot)
            async with Client(pool.config.coordinator) as client:
                preemptions = (await client.status()).preemptions
            await no_page_is_left(running)
        return found, preemptions

    found, preemptions = asyncio.run(serve())
    assert [completion.token_ids for completion in found] == reference
    wide = any(len(completion.finish.owners) > 1 for completion in found)
    assert preemptions or wide


def test_a_stream_goes_on_after_what_an_earlier_attempt_generated(
    pool_of: Callable[..., Any], expected: Callable[..., list[list[int]]]
) -> None:
    prompt, tokens = [7, 8, 9], 30
    hot = {"temperature": 0.9, "frequency_penalty": 0.5}
    (whole,) = expected([(prompt, tokens)], **hot)

    async def serve() -> tuple[list[Completion], str]:
        pool = pool_of(2, 160)
        found = []
        async with InProcessPool(pool), Client(pool.config.coordinator) as client:
            for given in (0, 1, 13, 29):
                request = request_for(prompt, sampling(tokens, seed=0, **hot))
                request.generated_token_ids = pack_ids(whole[:given])
                completion = Completion(0.0)
                async for response in client.generate(request):
                    completion.add(response, 0.0)
                found.append(completion)
            request.generated_token_ids = pack_ids(whole)
            with pytest.raises(RequestFailed) as refused:
                async for _ in client.generate(request):
                    pass
        return found, refused.value.message

    found, refusal = asyncio.run(serve())
    for given, completion in zip((0, 1, 13, 29), found, strict=True):
        assert completion.token_ids == whole[given:]
        assert completion.prompt_tokens == len(prompt)
        assert completion.finish.completion_tokens == tokens
    assert found[0].text.endswith(found[2].text)
    assert "generated_token_ids='30 ids': at most 29" in refusal


@pytest.mark.parametrize("values", [{"width": 2}, {"strategy": "pp"}], ids=str)
def test_synthetic_kv_runs_decode_alone(
    values: dict[str, Any], pool_of: Callable[..., Any]
) -> None:
    """No prefill at all; every request gives as many tokens as it was to, in several waves."""
    jobs = [([n] * (20 + n), 10) for n in range(12)]

    async def serve() -> list[Completion]:
        pool = pool_of(2, 128, prefill=0, synthetic_kv=True, hold_until=12, **values)
        async with InProcessPool(pool) as running:
            found = await run(pool.config.coordinator, jobs)
            await no_page_is_left(running)
        return found

    found = asyncio.run(serve())
    assert [len(completion.token_ids) for completion in found] == [10] * len(jobs)
    assert all(c.token_ids[0] == prompt[-1] for c, (prompt, _) in zip(found, jobs, strict=True))
