"""Every strategy against transformers, and what it sends against its programs.

A cell is a strategy on a logical grid and a seeded model. Twelve requests of uneven lengths join
and leave a batch that holds eight; each must get transformers' greedy ids, and every rank must have
sent exactly the bytes that its programs for those batches name.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tknp.engine.batch import Batch, Delta
from tknp.layout.derive import derive
from tknp.layout.layout import Layout
from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.local import InProcessPool
from tknp.transport.base import Traffic
from tknp.worker.runtime import DecodeRuntime

Generate = Callable[..., Awaitable[list[list[int]]]]
Deltas = Mapping[Rank, Sequence[Delta]]

INTERLEAVE = 4
MAX_BATCH = 8
STRATEGIES: dict[str, dict[str, Any]] = {
    "tknp": {},
    "offset": {"microbatches": 2},
    "dual": {"copies": 2},
    "split": {"roles": ("attention-owner", "decode-root")},
    "dp": {"strategy": "dp"},
    "tp": {"strategy": "tp"},
    "pp": {"strategy": "pp"},
    "pp-serial": {"strategy": "pp", "microbatches": 1},
    "dcp": {"strategy": "dcp"},
    "helix": {"strategy": "helix"},
    "helix-overlap": {"strategy": "helix", "overlap": 3},
}
SEQUENCE = ("dcp", "helix", "helix-overlap")


def cell(
    strategy: str, nodes: int, tp: int, kv_heads: int, quick: bool = False, **model: Any
) -> Any:
    """`quick` cells run in every suite, the others in the full one."""
    shape = {"layers": 4, "q_heads": 8, "kv_heads": kv_heads, "head_dim": 8, **model}
    marks = () if quick else (pytest.mark.full,)
    name = f"{strategy}-{nodes}x{tp}-hkv{kv_heads}{'-tied' * bool(model.get('tied'))}"
    return pytest.param(strategy, nodes, tp, shape, marks=marks, id=name)


QUICK = [
    cell("tknp", 3, 1, 2, True, tied=True),
    cell("offset", 2, 2, 2, True),
    cell("dual", 4, 1, 8, True, tied=True),
    cell("split", 2, 2, 1, True),
    cell("dp", 2, 1, 1, True),
    cell("tp", 1, 4, 2, True, tied=True),
    cell("pp", 2, 2, 2, True, tied=True),
    cell("pp-serial", 3, 1, 8, True),
    cell("dcp", 2, 2, 2, True, tied=True),
    cell("helix", 4, 1, 1, True),
    cell("helix-overlap", 2, 2, 2, True, tied=True),
]
FULL = [
    cell(strategy, 1 if strategy == "tp" else nodes, tp, kv_heads)
    for strategy in STRATEGIES
    for nodes in ((2, 4) if strategy in ("dual", *SEQUENCE) else (2,))
    for tp in ((2, 4, 8) if strategy == "tp" else (1, 2, 4))
    for kv_heads in (1, 2, 8)
    if strategy not in SEQUENCE or kv_heads % tp == 0
]


def jobs(vocabulary: int = 256) -> list[tuple[list[int], int]]:
    """Prompts below the number of shards and around pages and turns, outputs around turns."""
    dice = random.Random(5)
    sizes = [
        (1, INTERLEAVE), (2, INTERLEAVE + 1), (3, INTERLEAVE + 2), (4, 2 * INTERLEAVE),
        (5, 2 * INTERLEAVE + 1), (15, 2), (16, 1), (17, 14), (31, 11), (33, 19), (64, 9), (100, 16),
    ]  # fmt: skip
    return [([dice.randrange(vocabulary) for _ in range(n)], tokens) for n, tokens in sizes]


@pytest.fixture
def deltas(monkeypatch: pytest.MonkeyPatch) -> Deltas:
    """Every delta that each rank of a pool is given, in order."""
    seen: defaultdict[Rank, list[Delta]] = defaultdict(list)
    submit = DecodeRuntime.submit

    def watched(runtime: DecodeRuntime, delta: Delta) -> Any:
        seen[runtime.rank].append(delta)
        return submit(runtime, delta)

    monkeypatch.setattr(DecodeRuntime, "submit", watched)
    return seen


def expected_traffic(layout: Layout, rank: Rank, given: Sequence[Delta]) -> Traffic:
    """What `rank` sends in the steps that `given` begins, by its programs."""
    batches = {
        stream: Batch(1, layout, MAX_BATCH, stream)
        for stream in range(layout.streams)
        if rank.node in layout.members(stream)
    }
    sent: Counter[str] = Counter()
    for delta in given:
        batch = batches[delta.stream]
        batch.apply(delta)
        for op in derive(layout, delta.stream, batch.groups, rank):
            for transfer in op.sends:
                inside = transfer.dst.node == rank.node
                sent["node_local" if inside else "cross_node"] += transfer.nbytes
            if op.kind is Kind.ALL_REDUCE:
                sent["collective"] += op.operand_bytes
        batch.advance()
    return Traffic(**sent)


async def settled(running: InProcessPool, deltas: Deltas) -> None:
    """Wait until every request has left every rank, and all steps are over."""

    def busy(runtime: DecodeRuntime) -> bool:
        given = deltas[runtime.rank]
        left = sum(len(delta.admits) - len(delta.ends) for delta in given)
        return left > 0 or runtime.stepped < len(given)

    for _ in range(6000):
        if not any(busy(node.runtime) for node in running.nodes):
            return
        await asyncio.sleep(0.01)
    pytest.fail("a rank still runs a minute after the last token")


def check_traffic(running: InProcessPool, layout: Layout, deltas: Deltas) -> None:
    """What every rank sent is what its programs say."""
    for node in running.nodes:
        runtime = node.runtime
        expected = expected_traffic(layout, runtime.rank, deltas[runtime.rank])
        assert runtime.sent_bytes == expected, runtime.rank


CELLS = {param.id: param for param in [*FULL, *QUICK]}


@pytest.mark.parametrize(("strategy", "nodes", "tp", "shape"), list(CELLS.values()))
async def test_seeded_models(
    strategy: str,
    nodes: int,
    tp: int,
    shape: dict[str, Any],
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    random_greedy: Callable[[Path], Any],
    generate: Generate,
    deltas: Deltas,
) -> None:
    path = random_checkpoint(**shape)
    pool = make_pool(
        path, nodes=nodes, tp=tp, page_size=16, prefill_chunk=24, kv_memory_bytes="512KiB",
        kv_transfer="grpc", max_batch=MAX_BATCH, interleave=INTERLEAVE, **STRATEGIES[strategy],
    )  # fmt: skip
    async with InProcessPool(pool) as running:
        found = await generate(pool.config.coordinator, jobs())
        for node in running.nodes:
            if node.runtime.books is not None:
                node.runtime.books.check_integrity()
        await settled(running, deltas)
    assert found == random_greedy(path).all(jobs())
    check_traffic(running, pool.layout, deltas)


SMOLLM2 = [
    pytest.param("helix", 2, 1, 3, 6, id="helix-2x1-few"),
    pytest.param("dual", 2, 1, 3, 6, id="dual-2x1-few"),
    *(
        pytest.param(strategy, nodes, tp, 12, 16, marks=pytest.mark.full,
                     id=f"{strategy}-{nodes}x{tp}")
        for strategy in STRATEGIES
        for nodes, tp in ([(1, 3)] if strategy == "tp" else [(2, 1), (2, 3)])
    ),
]  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("strategy", "nodes", "tp", "prompts", "tokens"), SMOLLM2)
async def test_smollm2(
    strategy: str,
    nodes: int,
    tp: int,
    prompts: int,
    tokens: int,
    make_pool: Callable[..., Any],
    smollm2_greedy: Sequence[tuple[list[int], list[int]]],
    generate: Generate,
    deltas: Deltas,
) -> None:
    """The real model; its 9 heads and 3 KV heads are cut in the middle by two nodes."""
    given = smollm2_greedy[:prompts]
    pool = make_pool(
        "smollm2", nodes=nodes, tp=tp, kv_memory_bytes="64MiB", max_model_len=1024,
        max_batch=MAX_BATCH, kv_transfer="grpc", interleave=INTERLEAVE, **STRATEGIES[strategy],
    )  # fmt: skip
    async with InProcessPool(pool) as running:
        found = await generate(pool.config.coordinator, [(p, tokens) for p, _ in given])
        await settled(running, deltas)
    assert found == [ids[:tokens] for _, ids in given]
    check_traffic(running, pool.layout, deltas)
