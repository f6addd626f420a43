"""Requests over several owners, beside whole ones, against transformers."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tknp.engine.batch import Delta
from tknp.local import InProcessPool
from tknp.worker.runtime import DecodeRuntime

Generate = Callable[..., Awaitable[list[list[int]]]]
PAGE = 16
SHAPE = {"layers": 3, "q_heads": 4, "kv_heads": 2, "head_dim": 8, "max_position": 2048}
PAGE_BYTES = PAGE * 2 * SHAPE["layers"] * SHAPE["kv_heads"] * SHAPE["head_dim"] * 4


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, list[int]]:
    """Numbers of owners of every request that any node is told of, by request."""
    seen: dict[bytes, list[int]] = {}
    slots: dict[tuple[int, int], bytes] = {}
    submit = DecodeRuntime.submit

    def watched(runtime: DecodeRuntime, delta: Delta) -> Any:
        for admit in delta.admits:
            slots[delta.stream, admit.slot] = admit.key.request_id
            seen.setdefault(admit.key.request_id, []).append(len(admit.owners))
        for grow in delta.grows:
            seen[slots[delta.stream, grow.slot]].append(len(grow.shares.owners))
        return submit(runtime, delta)

    monkeypatch.setattr(DecodeRuntime, "submit", watched)
    return seen


def prompt(tokens: int) -> list[int]:
    dice = random.Random(tokens)
    return [dice.randrange(256) for _ in range(tokens)]


@pytest.mark.parametrize(("tp", "interleave"), [(1, 3), (2, 16)])
async def test_widths_one_to_three_in_one_batch(
    tp: int,
    interleave: int,
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
    widths: dict[bytes, list[int]],
) -> None:
    """A node holds 12 pages: 150 tokens stay whole, 300 take two owners, 500 three."""
    path = random_checkpoint(**SHAPE)
    pool = make_pool(
        path, nodes=3, tp=tp, page_size=PAGE, kv_memory_bytes=13 * PAGE_BYTES // tp,
        prefill_chunk=128, max_model_len=576, kv_transfer="grpc", interleave=interleave,
    )  # fmt: skip
    jobs = [
        (prompt(300), 2 * interleave + 1), (prompt(7), 30), (prompt(16), 5), (prompt(150), 8),
        (prompt(500), interleave + 1), (prompt(3), 20), (prompt(299), 40), (prompt(33), 17),
    ]  # fmt: skip
    async with InProcessPool(pool) as running:
        found = await generate(pool.config.coordinator, jobs)
        for node in running.nodes:
            if node.runtime.books is not None:
                node.runtime.books.check_integrity()
    assert found == random_greedy(path).all(jobs)
    assert sorted({owners for each in widths.values() for owners in each}) == [1, 2, 3]


async def test_a_prompt_longer_than_any_node_beside_twenty_short_ones(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
    widths: dict[bytes, list[int]],
) -> None:
    """1.6 times the KV budget of one of two nodes."""
    path = random_checkpoint(**SHAPE)
    pages = 41  # one of them the dummy
    pool = make_pool(
        path, nodes=2, page_size=PAGE, kv_memory_bytes=pages * PAGE_BYTES, prefill_chunk=512,
        max_model_len=1200, kv_transfer="grpc",
    )  # fmt: skip
    jobs = [(prompt(9 + n), 5 + n % 7) for n in range(20)]
    jobs.insert(6, (prompt(int(1.6 * (pages - 1) * PAGE)), 40))
    async with InProcessPool(pool):
        found = await generate(pool.config.coordinator, jobs)
    assert found == random_greedy(path).all(jobs)
    assert [each for each in widths.values() if max(each) > 1]


@pytest.mark.parametrize("tp", [1, 2])
async def test_requests_outgrow_their_owner(
    tp: int,
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
    widths: dict[bytes, list[int]],
) -> None:
    """Admitted whole, by their prompts; 6 pages hold 96 tokens, and one request ends at 120."""
    path = random_checkpoint(**SHAPE)
    pool = make_pool(
        path, nodes=3, tp=tp, page_size=PAGE, kv_memory_bytes=7 * PAGE_BYTES // tp,
        max_model_len=160, kv_transfer="grpc", interleave=5, reserve_ratio=0.0,
    )  # fmt: skip
    jobs = [(prompt(60), 60), (prompt(20), 30), (prompt(30), 50), (prompt(17), 20), (prompt(5), 9)]
    async with InProcessPool(pool) as running:
        found = await generate(pool.config.coordinator, jobs)
        for node in running.nodes:
            if node.runtime.books is not None:
                node.runtime.books.check_integrity()
    assert found == random_greedy(path).all(jobs)
    assert [each for each in widths.values() if each[0] == 1 and max(each) > 1]
