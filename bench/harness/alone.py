"""What token parallelism costs a pool that doesn't use it: one node against a plain loop.

The plain loop is the step of an engine that knows no nodes: the same kernels, all layers in one
call as the engine has it where no row leaves the rank, the same pages and sampler, no program, no
streams, no transport. Steps of the two take turns, each on its own pages.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from harness.layers import run_through
from harness.report import Row, Target, note
from tknp.attention.base import DecodeRows
from tknp.engine.backend import choose_backend, whole_layers
from tknp.engine.batch import Admit, Delta
from tknp.engine.decode import DecodeRank
from tknp.kv.holding import Key
from tknp.kv.storage import KvStorage
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind, Op
from tknp.layout.rank import Rank
from tknp.layout.shares import Shares
from tknp.model.checkpoint import open_checkpoint
from tknp.sampling.history import RowState
from tknp.sampling.params import SamplingParams
from tknp.sampling.sampler import Sampler
from tknp.transport.local import LocalHub

CONTEXT = 512
BATCHES = (1, 8)
MOST = 1.03
_PAGE = 64
_WARM = 8
_STAGES = (Kind.PROJECT, Kind.ATTEND, Kind.FINISH)
_PARAMS = SamplingParams(max_tokens=100_000, ignore_eos=True)


class Bench:
    """The same batch twice: at a DecodeRank and in a plain loop."""

    def __init__(self, threads: int, steps: int) -> None:
        torch.set_num_threads(threads)
        checkpoint = open_checkpoint("smollm2")
        self._config = checkpoint.config
        self._layout = make_layout(self._config, "bfloat16", 1, [NodeSpec(0)])
        self._longest = CONTEXT + steps + _WARM + 1
        (shard,) = self._layout.shards(Rank(0, 0))
        backend = choose_backend(
            shard, page_size=_PAGE, max_positions=self._longest + 1, dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )  # fmt: skip
        self._dense = backend.dense(checkpoint.load(shard, torch.bfloat16))
        self._attention = backend.decode_attention()
        self._transport = LocalHub(1, 1, 60.0).transport(Rank(0, 0))
        self._steps = steps

    def ratio(self, batch: int) -> Row:
        """Median step of the engine to that of the plain loop."""
        engine, plain = self._engine(batch), self._plain(batch)
        seconds: tuple[list[float], list[float]] = [], []
        for _ in range(self._steps + _WARM):
            for spent, step in zip(seconds, (engine, plain), strict=True):
                began = time.perf_counter()
                step()
                spent.append(time.perf_counter() - began)
        ours, theirs = (statistics.median(spent[_WARM:]) * 1e3 for spent in seconds)
        name = f"one node, context {CONTEXT}, batch {batch}: step, to a loop without programs"
        note(f"  {name}: {ours:.2f} and {theirs:.2f} ms")
        return Row(name, ours, "ms", theirs, Target("ratio", most=MOST))

    def _storage(self, batch: int) -> tuple[KvStorage, list[tuple[int, ...]]]:
        each = -(-self._longest // _PAGE)
        storage = KvStorage(
            self._config.layers, 1 + batch * each, self._config.kv_heads, _PAGE,
            self._config.head_dim, torch.bfloat16,
        )  # fmt: skip
        storage.fill(0)
        first = range(1, 1 + batch * each, each)
        return storage, [tuple(range(page, page + each)) for page in first]

    def _engine(self, batch: int) -> Callable[[], object]:
        storage, tables = self._storage(batch)
        rank = DecodeRank(
            self._layout, Rank(0, 0), self._transport,
            dense=self._dense, attention=self._attention, storage=storage, epoch=1,
            max_batch=batch, device=torch.device("cpu"),
        )  # fmt: skip
        shares = Shares((0,), CONTEXT)
        admits = tuple(
            Admit(slot, Key(bytes([slot]), 0), (0,), shares, CONTEXT, 1, _PARAMS, pages=pages)
            for slot, pages in enumerate(tables)
        )
        rank.step(Delta(1, 0, 0, admits=admits))
        steps = iter(range(1, self._steps + _WARM + 1))
        return lambda: rank.step(Delta(1, 0, next(steps)))

    def _plain(self, batch: int) -> Callable[[], object]:
        storage, tables = self._storage(batch)
        pages = {layer: storage.layer(layer) for layer in range(self._config.layers)}
        rows = DecodeRows(
            torch.tensor(tables, dtype=torch.int32),
            torch.full((batch,), CONTEXT, dtype=torch.int32),
            torch.full((batch,), CONTEXT + 1, dtype=torch.int32),
            torch.ones(batch, dtype=torch.bool),
        )
        sampler = Sampler(self._config.vocab_size, self._config.eos_ids)
        states = [RowState(_PARAMS, CONTEXT + 1, 1, None) for _ in range(batch)]
        ids = torch.ones(batch, dtype=torch.int64)
        dense, attention = self._dense, self._attention
        layers, stages = range(len(pages)), [Op(kind, 0, batch, 0) for kind in _STAGES]
        whole = whole_layers(
            self._layout.heads(Rank(0, 0)), dense, attention, pages,
            max_rows=batch, transport=self._transport, stream=0,
        )  # fmt: skip
        prepared = None if whole is None else whole.prepare(layers, stages)

        @torch.inference_mode()
        def step() -> None:
            plan = attention.plan(rows)
            x = dense.embed(ids)
            if whole is not None and prepared is not None:
                x = run_through(whole.run(prepared, plan, x)).x
            else:
                for layer, kv in pages.items():
                    qkv = dense.project(layer, x)
                    x = dense.finish(layer, x, attention.attend(plan, qkv, *kv)[0])
            tokens = sampler.sample(dense.head(x), states).tokens
            for state, token in zip(states, tokens, strict=True):
                state.advance(token)
            ids.copy_(torch.tensor(tokens))
            rows.positions.add_(1)
            rows.lengths.add_(1)

        step()
        return step


def rows(threads: int, steps: int) -> list[Row]:
    bench = Bench(threads, steps)
    return [bench.ratio(batch) for batch in BATCHES]
