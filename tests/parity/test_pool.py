"""Whole pools against transformers: greedy ids are equal whatever the layout and the batch."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tknp.local import InProcessPool

Generate = Callable[..., Awaitable[list[list[int]]]]


def cells() -> list[Any]:
    """Nodes, TP degree, short prompts, the last one, tokens.

    The longest prompt once for each TP degree; everywhere, with more tokens, in `make test-full`.
    """
    quick = [
        (1, 1, 11, 11, 16), (2, 1, 11, 12, 16), (3, 1, 5, 11, 8), (1, 3, 5, 11, 8),
        (2, 3, 5, 12, 8),
    ]  # fmt: skip
    full = [(nodes, tp, 11, 12, 40) for nodes, tp, *_ in quick]
    return [*quick, *(pytest.param(*cell, marks=pytest.mark.full) for cell in full)]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nodes", "tp", "short", "last", "tokens"), cells())
async def test_smollm2_equals_transformers(
    nodes: int,
    tp: int,
    short: int,
    last: int,
    tokens: int,
    make_pool: Callable[..., Any],
    smollm2_greedy: Sequence[tuple[list[int], list[int]]],
    generate: Generate,
) -> None:
    """Short prompts beside a `last` one, of 206 tokens or of 1,510."""
    given = [*smollm2_greedy[:short], smollm2_greedy[last]]
    assert len(given[-1][0]) > (1500 if last == 12 else 200)
    pool = make_pool(
        "smollm2", nodes=nodes, tp=tp, kv_memory_bytes="192MiB" if tp == 1 else "64MiB",
        max_model_len=4096, kv_transfer="grpc" if tp > 1 else "auto",
    )  # fmt: skip
    async with InProcessPool(pool):
        found = await generate(pool.config.coordinator, [(p, tokens) for p, _ in given])
    assert found == [ids[:tokens] for _, ids in given]


@pytest.mark.parametrize(
    ("nodes", "tp", "prefill_tp", "shape"),
    [
        (2, 2, 1, {"layers": 4, "q_heads": 4, "kv_heads": 2}),
        (4, 1, 2, {"layers": 5, "q_heads": 4, "kv_heads": 4, "tied": True}),
        (2, 4, 2, {"layers": 3, "q_heads": 8, "kv_heads": 2}),
        (2, 2, 4, {"layers": 3, "q_heads": 8, "kv_heads": 1, "tied": True}),
    ],
)
async def test_batches_grow_and_shrink(
    nodes: int,
    tp: int,
    prefill_tp: int,
    shape: dict[str, Any],
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
) -> None:
    """Lengths around page boundaries, uneven outputs: rows join and leave at every step."""
    path = random_checkpoint(**shape)
    pool = make_pool(
        path, nodes=nodes, tp=tp, prefill_tp=prefill_tp,
        page_size=16, prefill_chunk=24, kv_memory_bytes="512KiB", kv_transfer="grpc",
    )  # fmt: skip
    dice = random.Random(nodes * 10 + tp)
    lengths = [1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100]
    jobs = [([dice.randrange(256) for _ in range(n)], dice.randint(1, 40)) for n in lengths]
    async with InProcessPool(pool) as running:
        found = await generate(pool.config.coordinator, jobs)
        for node in running.nodes:
            if node.runtime.books is not None:
                node.runtime.books.check_integrity()
    assert found == random_greedy(path).all(jobs)


async def test_owners_without_rows(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
) -> None:
    """One request in a pool of four: three owners have no rows in any step."""
    path = random_checkpoint(layers=5, q_heads=4, kv_heads=2)
    pool = make_pool(path, nodes=4, page_size=16, kv_memory_bytes="512KiB", kv_transfer="grpc")
    async with InProcessPool(pool):
        found = await generate(pool.config.coordinator, [([7, 8, 9], 20)])
    assert found == [random_greedy(path)([7, 8, 9], 20)]


async def test_roots_and_owners_on_different_nodes(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
) -> None:
    """Operator disaggregation is a layout too: two root-only nodes, two attention-only nodes."""
    path = random_checkpoint(layers=5, q_heads=4, kv_heads=2)
    pool = make_pool(
        path, nodes=4, page_size=16, kv_memory_bytes="512KiB", kv_transfer="grpc",
        roles=("decode-root", "attention-owner", "decode-root", "attention-owner"),
    )  # fmt: skip
    jobs = [([n, n + 1, n + 2], 12 + n) for n in range(6)]
    async with InProcessPool(pool):
        found = await generate(pool.config.coordinator, jobs)
    assert found == random_greedy(path).all(jobs)
