"""Strategies side by side on one workload, with all its admission waves.

    release: all requests submitted, KV ready                            last completion
    |-- wave of those that fit --|-- as they end, others --| ... |-- drain --|

Every node has the memory in which weights stand to weights plus KV as in section 3.2 of Decode
Token Parallelism, 454 : 560 for data parallelism. KV is ready at release as in the paper: pages are
filled beforehand and nobody computes prompts. What counts is the last completion, so clients take
their first token and then a whole answer. A request ends after exactly `tokens`. Contexts count the
token that is fed first, so that every counted token comes from a step.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from harness.machine import load_average, read_bandwidth
from harness.panels import Look
from harness.pool import Stream, generate, pool, prompts
from harness.report import note
from tknp.cli.local_pool import RunningPool
from tknp.client import Client
from tknp.model.checkpoint import open_checkpoint
from tknp.model.footprint import footprint

WEIGHTS_GIB, BUDGET_GIB = 454, 560


@dataclass(frozen=True)
class Variant:
    """A strategy with its settings. `doubled`: one node alone with half the requests, times two.

    `look`: of its lines in plots.
    """

    name: str
    settings: Mapping[str, object]
    look: Look
    token_parallel: bool = False
    doubled: bool = False


VARIANTS = (
    Variant("DP", {"strategy": "dp"}, Look("muted")),
    Variant("DP alone, doubled", {"strategy": "dp"}, Look("muted", "D", "--"), doubled=True),
    Variant("PP serial", {"strategy": "pp", "microbatches": 1}, Look("s1", "v", ":")),
    Variant("PP", {"strategy": "pp"}, Look("s1", "^")),
    Variant("DCP", {"strategy": "dcp"}, Look("s4", "P")),
    Variant("Helix", {"strategy": "helix"}, Look("s3", "p")),
    Variant("Helix HOP-B", {"strategy": "helix", "overlap": 2}, Look("s3", "X", ":")),
    Variant("TKNP", {"width": 1}, Look("s0"), token_parallel=True),
    Variant(
        "TKNP offset", {"width": 1, "microbatches": 2}, Look("s0", "s", "--"), token_parallel=True
    ),
    Variant("TKNP dual", {"width": 1, "copies": 2}, Look("s2", "d", "-."), token_parallel=True),
)
DP, DOUBLED, _, PIPELINE = VARIANTS[:4]


@dataclass(frozen=True)
class Run:
    """One workload. Times are means over its requests, in seconds since release or between tokens.

    `waiting_s`: until the first token. `read_gb_per_s`: of one thread and of two, just before.
    """

    tokens_per_s: float
    waiting_s: float
    itl_s: float
    completion_s: float
    read_gb_per_s: tuple[float, float]


@dataclass
class Cell:
    """What was measured of a variant at one context and offered batch."""

    link: str
    variant: str
    context: int
    batch: int
    tokens: int
    runs: list[Run] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(getattr(run, name) for run in self.runs)

    def plain(self) -> dict[str, object]:
        return asdict(self)


def node_memory_bytes() -> int:
    """Weights plus KV of a node; weights with one copy of the embedding."""
    weights = footprint(open_checkpoint("smollm2").config, "bfloat16").total
    return weights * BUDGET_GIB // WEIGHTS_GIB


async def measure(
    variant: Variant,
    contexts: Sequence[int],
    batches: Sequence[int],
    tokens: int,
    settings: Mapping[str, object],
    keep: Callable[[int, int, Run], None],
) -> None:
    """Give `keep` (context, batch, run) of each combination, one pool for all of them."""
    shared: dict[str, object] = {
        "synthetic_kv": True, "max_batch": max(batches), "max_queue": max(batches) + 1,
        "max_model_len": max(contexts) + tokens + 1, **settings, **variant.settings,
    }  # fmt: skip
    nodes = 1 if variant.doubled else 2
    async with pool(
        1, nodes=nodes, prefill=0, memory_bytes=node_memory_bytes(), settings=shared
    ) as (up, client):
        _pin(up)
        await _release(client, prompts(2, 64), 4)  # warm
        for context in contexts:
            for batch in batches:
                reads = read_bandwidth(1), read_bandwidth(2)
                offered = batch // 2 if variant.doubled else batch
                streams = await _release(client, prompts(offered, context - 1), tokens + 1)
                run = _run(streams, tokens, 2 if variant.doubled else 1, reads)
                note(
                    f"  {variant.name}, context {context}, {batch} offered: "
                    f"{run.tokens_per_s:,.0f} tokens/s, ITL {run.itl_s * 1e3:.1f} ms "
                    f"(reads {reads[0]:.0f} and {reads[1]:.0f} GB/s, load {load_average():.1f})"
                )
                keep(context, batch, run)


def _pin(up: RunningPool) -> None:
    """A core for each node; the coordinator and the client go wherever there is room."""
    cores = sorted(os.sched_getaffinity(0))
    nodes = [pid for name, pid in up.pids.items() if name.startswith("decode-node")]
    for pid, core in zip(nodes, cores, strict=False):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {core})


async def _release(client: Client, batch: Sequence[Sequence[int]], tokens: int) -> list[Stream]:
    return await asyncio.gather(*(generate(client, prompt, tokens, tokens) for prompt in batch))


def _run(
    streams: Sequence[Stream], tokens: int, factor: int, reads: tuple[float, float]
) -> Run:  # fmt: skip
    """The first token of each stream is its prompt's last: it says that the request has begun."""
    last = max(stream.tokens_s[-1] for stream in streams)
    return Run(
        tokens_per_s=factor * len(streams) * tokens / last,
        waiting_s=statistics.mean(s.tokens_s[0] for s in streams),
        itl_s=statistics.mean((s.tokens_s[-1] - s.tokens_s[0]) / tokens for s in streams),
        completion_s=statistics.mean(s.tokens_s[-1] for s in streams),
        read_gb_per_s=reads,
    )
