"""Whole pools against transformers: greedy ids are equal whatever the layout and the batch."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tknp.local import InProcessPool
from tknp.model.checkpoint import open_checkpoint
from tknp.model.tokenizer import load_tokenizer

Greedy = Callable[[Sequence[int], int], list[int]]
Generate = Callable[..., Awaitable[list[list[int]]]]
Answers = Callable[[Sequence[Sequence[int]], int], list[list[int]]]
LONG = "".join(
    f"Entry {n}: the keeper of lamp {n * 7 % 90} saw {n % 13} ships.\n" for n in range(86)
)
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "Water boils at 100 degrees",
    "🙂🚀 emoji are fun, and so is 🎻 because",
    "日本の首都は東京です。中国的首都是",
    "Combine é ñ ü ŷ and count to 12345 67890:",
    "SELECT name, price FROM products WHERE",
    "1, 1, 2, 3, 5, 8, 13,",
    "A",
    "\n\n",
    LONG,
]
TOKENS = 40


@contextmanager
def every_core() -> Iterator[None]:
    """Let one operation use all cores; the suite runs with one thread an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("nodes", "tp", "tokens"), [(1, 1, 24), (2, 1, 40), (3, 1, 24), (1, 3, 24), (2, 3, 24)]
)
async def test_smollm2_equals_transformers(
    nodes: int,
    tp: int,
    tokens: int,
    make_pool: Callable[..., Any],
    smollm2_answers: Answers,
    generate: Generate,
) -> None:
    tokenizer = load_tokenizer(open_checkpoint("smollm2"))
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    assert max(map(len, prompts)) > 1500
    pool = make_pool(
        "smollm2", nodes=nodes, tp=tp, kv_memory_bytes="192MiB",
        max_model_len=4096, kv_transfer="grpc" if tp > 1 else "auto",
    )  # fmt: skip
    with every_core():
        expected = [ids[:tokens] for ids in smollm2_answers(prompts, TOKENS)]
    # One rank computes at a time where each node has one; with TP, ranks share the cores.
    with every_core() if tp == 1 else nullcontext():
        async with InProcessPool(pool):
            found = await generate(pool.config.coordinator, [(p, tokens) for p in prompts])
    assert found == expected


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
    random_greedy: Callable[[Path], Greedy],
    generate: Generate,
) -> None:
    """Lengths around page boundaries, uneven outputs: rows join and leave at every step."""
    path = random_checkpoint(**shape)
    greedy = random_greedy(path)
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
    assert found == [greedy(*job) for job in jobs]


async def test_owners_without_rows(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Greedy],
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
    random_greedy: Callable[[Path], Greedy],
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
    assert found == [random_greedy(path)(*job) for job in jobs]
