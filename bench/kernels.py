"""Speed of one model step on the CPU kernels, beside the memory bandwidth of the same minute.

    python bench/kernels.py                       SmolLM2-135M's shape, all threads, a table
    python bench/kernels.py --threads 1 --json    the same numbers as JSON

Weights and KV are random: speed doesn't depend on them. A decode step embeds one token a row, runs
every layer and computes the logits; sampling is not in it. Pages of a request are scattered over
the pool. Layers of decoding run in one call, as in a node that roots and owns all. A result is the
median of `--tries` steps; the best is given beside it, since neighbours only ever make a step
slower.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from harness.layers import run_through
from harness.machine import read_bandwidth
from harness.options import finish, parser, tries
from harness.report import Row, note
from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.kernels.decode import KernelDecodeAttention
from tknp.kernels.dense import KernelDense
from tknp.kernels.layers import KernelLayers
from tknp.kernels.library import available
from tknp.kernels.prefill import KernelPrefillAttention
from tknp.kv.storage import KvStorage
from tknp.layout.program import Kind, Op
from tknp.model.config import ModelConfig
from tknp.model.rope import rope_table
from tknp.model.shard import Shard
from tknp.model.weights import LayerWeights, ShardWeights

SMOLLM2_135M = ModelConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, layers=30, q_heads=9, kv_heads=3,
    head_dim=64, max_position=8192, tied_embeddings=True,
)  # fmt: skip
PAGE_TOKENS = 64
CHUNK_TOKENS = 512
DECODE = ((512, 1), (512, 8), (512, 32), (512, 64), (4096, 8))
PREFILL = ((512, 1), (2048, 1))
STAGES = (Kind.PROJECT, Kind.ATTEND, Kind.FINISH)


@dataclass(frozen=True)
class Result:
    """`median` and `best` in tokens/s, parts of the best; `read_gb_per_s` measured just before."""

    phase: str
    context: int
    batch: int
    median: float
    best: float
    dense_ms: float
    attention_ms: float
    read_gb_per_s: float


class Clock:
    """Seconds by part of a step."""

    def __init__(self) -> None:
        self.spent = {"dense": 0.0, "attention": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.spent[name] += time.perf_counter() - start


Step = Callable[[int, int, Clock], None]  # context, batch


def random_weights(config: ModelConfig) -> ShardWeights:
    shard = Shard(config, 0, config.layers, embedding=True, head=True)
    d, f = config.hidden_size, config.intermediate_size

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16).mul_(1 / math.sqrt(shape[-1]))

    layers = {
        layer: LayerWeights(
            torch.ones(d), random(shard.qkv_width, d), random(d, shard.q_width), torch.ones(d),
            random(2 * f, d), random(d, f),
        )
        for layer in shard.layers
    }  # fmt: skip
    embedding = random(config.vocab_size, d)
    head = embedding if config.tied_embeddings else random(config.vocab_size, d)
    return ShardWeights(shard, layers, embedding, torch.ones(d), head)


class Model:
    """One process's model: dense operations, attention and a pool of scattered pages."""

    def __init__(self, config: ModelConfig, tokens: int) -> None:
        self.config = config
        self.dense = KernelDense(random_weights(config))
        self.shape = AttentionShape(config.q_heads, config.kv_heads, config.head_dim, PAGE_TOKENS)
        rope = rope_table(config, torch.arange(config.max_position))
        self.decode_attention = KernelDecodeAttention(self.shape, rope)
        self.prefill_attention = KernelPrefillAttention(self.shape, rope)
        pages = 1 + -(-tokens // PAGE_TOKENS)
        self.kv = KvStorage(
            config.layers, pages, config.kv_heads, PAGE_TOKENS, config.head_dim, torch.bfloat16
        )
        self.kv.data[0].normal_()
        self.kv.data[1:] = self.kv.data[0]
        self.scattered = 1 + torch.randperm(pages - 1).int()
        kept = {layer: self.kv.layer(layer) for layer in range(config.layers)}
        self.layers = KernelLayers(
            self.dense.shard, [self.dense], self.decode_attention, kept,
            max_rows=max(batch for _, batch in DECODE),
        )  # fmt: skip

    def tables(self, batch: int, context: int) -> Tensor:
        width = -(-context // PAGE_TOKENS)
        return self.scattered[: batch * width].view(batch, width)

    def decode(self, context: int, batch: int, clock: Clock) -> None:
        lengths = torch.full((batch,), context, dtype=torch.int32)
        append = torch.ones(batch, dtype=torch.bool)
        rows = DecodeRows(self.tables(batch, context), lengths - 1, lengths, append)
        with clock.part("attention"):
            plan = self.decode_attention.plan(rows)
        ids = torch.randint(self.config.vocab_size, (batch,))
        with clock.part("dense"):
            x = self.dense.embed(ids)
        stages = [Op(kind, 0, batch, 0) for kind in STAGES]
        prepared = self.layers.prepare(range(self.config.layers), stages)
        ran = run_through(self.layers.run(prepared, plan, x))
        attention_s = sum(ran.seconds[1 :: len(STAGES)])
        clock.spent["attention"] += attention_s
        clock.spent["dense"] += sum(ran.seconds) - attention_s
        with clock.part("dense"):
            self.dense.head(ran.x)

    def prefill(self, context: int, batch: int, clock: Clock) -> None:
        for table in self.tables(batch, context):
            for start in range(0, context, CHUNK_TOKENS):
                ids = torch.randint(self.config.vocab_size, (min(CHUNK_TOKENS, context - start),))
                x = self._chunk(ids, start, table, clock)
            with clock.part("dense"):
                self.dense.head(x[-1:])

    def _chunk(self, ids: Tensor, start: int, table: Tensor, clock: Clock) -> Tensor:
        with clock.part("dense"):
            x = self.dense.embed(ids)
        for layer in range(self.config.layers):
            with clock.part("dense"):
                qkv = self.dense.project(layer, x)
            with clock.part("attention"):
                out = self.prefill_attention.attend(qkv, start, table, *self.kv.layer(layer))
            with clock.part("dense"):
                x = self.dense.finish(layer, x, out)
        return x


def measure(phase: str, step: Step, context: int, batch: int, count: int) -> Result:
    bandwidth = read_bandwidth(torch.get_num_threads())
    step(context, batch, Clock())
    clocks = []
    for _ in range(count):
        clock = Clock()
        step(context, batch, clock)
        clocks.append(clock.spent)
    clocks.sort(key=lambda spent: sum(spent.values()))
    best, median = clocks[0], clocks[len(clocks) // 2]
    tokens = batch * (context if phase == "prefill" else 1)
    return Result(
        phase, context, batch, tokens / sum(median.values()), tokens / sum(best.values()),
        best["dense"] * 1e3, best["attention"] * 1e3, bandwidth,
    )  # fmt: skip


def main() -> None:
    options = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    status = available()
    if not status:
        sys.exit(f"no kernels here: {status.reason}")
    note("phase    context batch   median     best  dense ms  attention ms  read GB/s")
    count = tries(options, 15)
    most = max(context * batch for context, batch in DECODE + PREFILL)
    results = []
    with torch.inference_mode():
        model = Model(SMOLLM2_135M, most)
        plans = [("decode", model.decode, shape, count) for shape in DECODE]
        plans += [("prefill", model.prefill, shape, max(count // 4, 1)) for shape in PREFILL]
        for phase, step, (context, batch), times in plans:
            results.append(measure(phase, step, context, batch, times))
            note(line(results[-1]))
    rows = [
        Row(f"{r.phase}, context {r.context}, batch {r.batch}", r.median, "tokens/s")
        for r in results
    ]
    finish(f"Bare kernels, {status.isa}, {options.threads} threads", rows, options)


def line(r: Result) -> str:
    return (
        f"{r.phase:8} {r.context:7} {r.batch:5} {r.median:8.1f} {r.best:8.1f} "
        f"{r.dense_ms:9.1f} {r.attention_ms:13.1f} {r.read_gb_per_s:10.1f}"
    )


if __name__ == "__main__":
    main()
