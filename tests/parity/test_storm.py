"""Many requests at once against few pages: each ends in one way, with the tokens that are due."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tknp.client import Client, RequestFailed, request_for
from tknp.local import InProcessPool
from tknp.rpc.ids import unpack_ids
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import GenerateRequest

REQUESTS = 300
LONGEST = 20
ENDS = {"RESOURCE_EXHAUSTED": "refused", "DEADLINE_EXCEEDED": "failed"}


@dataclass(frozen=True)
class Job:
    """`leaves_after`: the client goes away when it has so many tokens; None: it stays."""

    prompt: tuple[int, ...]
    tokens: int
    priority: int
    leaves_after: int | None
    timeout_s: float


def jobs(seed: int, prompts: Sequence[tuple[int, ...]]) -> list[Job]:
    dice = random.Random(seed)
    return [
        Job(
            dice.choice(prompts),
            dice.randint(1, LONGEST),
            dice.randint(-2, 2),
            dice.randint(0, 10) if dice.random() < 0.2 else None,
            dice.uniform(0.05, 2.0) if dice.random() < 0.15 else 0.0,
        )
        for _ in range(REQUESTS)
    ]


async def play(client: Client, job: Job) -> tuple[str, list[int]]:
    """How the request ended for its client, and the tokens it got."""
    request = request_for(job.prompt, Sampling(max_tokens=job.tokens, ignore_eos=True))
    request.MergeFrom(GenerateRequest(priority=job.priority, timeout_s=job.timeout_s))
    ids: list[int] = []
    try:
        async with aclosing(client.generate(request)) as stream:
            async for response in stream:
                ids += unpack_ids("token_ids", response.token_ids)
                leaves = job.leaves_after is not None and len(ids) >= job.leaves_after
                if leaves and not response.HasField("finish"):
                    return "cancelled", ids
    except RequestFailed as error:
        return ENDS[error.code], ids
    return "complete", ids


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_every_request_ends_in_one_way(
    seed: int,
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
) -> None:
    path = random_checkpoint(layers=3, q_heads=4, kv_heads=2)
    dice = random.Random(seed)
    prompts = [tuple(dice.randrange(256) for _ in range(dice.randint(1, 60))) for _ in range(30)]
    answers = random_greedy(path).all([(prompt, LONGEST) for prompt in prompts])
    expected = dict(zip(prompts, answers, strict=True))
    pool = make_pool(
        path, nodes=2, page_size=16, prefill_chunk=24, kv_memory_bytes="256KiB", max_batch=24,
        max_queue=150,
    )  # fmt: skip
    storm = jobs(seed, prompts)
    async with InProcessPool(pool) as running, Client(pool.config.coordinator) as client:
        before = await client.status()
        played = await asyncio.gather(*(play(client, job) for job in storm))
        for job, (end, ids) in zip(storm, played, strict=True):
            assert ids == expected[job.prompt][: len(ids)], "a token differs from the reference"
            assert len(ids) == job.tokens or end != "complete"
        status = await client.status()
        while any(node.used_pages for node in status.nodes):
            status = await client.status()
        for node in running.nodes:
            books = node.runtime.books
            assert books is not None
            books.check_integrity()
            assert books.free_tokens == books.total_tokens
        counts = Counter(
            complete=status.completed - before.completed, cancelled=status.cancelled,
            refused=status.refused, failed=status.failed,
        )  # fmt: skip
    ends = Counter(end for end, _ in played)
    assert sum(counts.values()) == REQUESTS
    assert min(counts["complete"], ends["complete"], ends["refused"]) > 0
    # A client that leaves while the last token is on its way is complete for the pool.
    assert ends["complete"] <= counts["complete"] <= ends["complete"] + ends["cancelled"]
