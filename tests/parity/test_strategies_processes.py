"""Strategies whose ranks are processes, over both data planes, against transformers."""

from __future__ import annotations

import io
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tknp.cli.local_pool import LOOPBACK, LocalPool, running

Generate = Callable[..., Awaitable[list[list[int]]]]
START_S = 300.0
FULL = pytest.mark.full
CELLS = [
    pytest.param(2, 1, {"strategy": "helix", "overlap": 2}, id="helix-shared-memory"),
    pytest.param(2, 1, {"copies": 2, "transport": "distributed", "interface": "lo"},
                 id="dual-gloo", marks=FULL),
    pytest.param(3, 1, {"strategy": "dcp", "transport": "distributed", "interface": "lo"},
                 id="dcp-gloo", marks=FULL),
    pytest.param(2, 2, {"microbatches": 2}, id="offset-shared-memory", marks=FULL),
    pytest.param(2, 2, {"strategy": "pp"}, id="pp-shared-memory", marks=FULL),
    pytest.param(3, 1, {"roles": ("decode-root", "attention-owner", "attention-owner")},
                 id="split-shared-memory", marks=FULL),
    pytest.param(1, 4, {"strategy": "tp", "transport": "distributed", "interface": "lo"},
                 id="tp-gloo", marks=FULL),
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("nodes", "tp", "settings"), CELLS)
async def test_processes(
    nodes: int,
    tp: int,
    settings: dict[str, Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
) -> None:
    path = random_checkpoint(layers=4, q_heads=8, kv_heads=4, head_dim=12)
    others = {name: value for name, value in settings.items() if name != "roles"}
    local = LocalPool(
        str(path), nodes, tp, 1, 1, LOOPBACK, 0, roles=settings.get("roles", ()),
        settings={
            "dtype": "float32", "page_size": 16, "kv_memory_bytes": 1 << 20, "interleave": 4,
            "max_batch": 4, "timeout_s": 60.0, **others,
        },
    )  # fmt: skip
    dice = random.Random(3)
    sizes = [(1, 5), (2, 4), (17, 13), (40, 9), (16, 3), (33, 20)]
    jobs = [([dice.randrange(256) for _ in range(n)], tokens) for n, tokens in sizes]
    async with running(local.configure(), Console(file=io.StringIO()), START_S) as pool:
        found = await generate(pool.target, jobs)
    assert found == random_greedy(path).all(jobs)
