"""One rank of the decode pool: its weights, its pages, its part of every step.

A step: apply the delta, derive this rank's program, execute it, report. The sampling rank reports
a token for every row; the others report that the step is done. An error breaks the rank: its
transport is aborted so that peers stop waiting, and later steps are refused. One thread owns a
DecodeRank.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tknp.attention.base import DecodeAttention
from tknp.engine.batch import Admit, Batch, Delta
from tknp.engine.executor import Executor, Frame
from tknp.engine.owned import OwnedRows
from tknp.engine.times import StepTimes
from tknp.errors import ProtocolError, TknpError
from tknp.kv.storage import KvStorage
from tknp.layout.layout import Layout
from tknp.layout.program import Program
from tknp.layout.rank import Rank
from tknp.layout.tknp import derive
from tknp.model.dense import Dense
from tknp.sampling.history import History, RowState
from tknp.sampling.sampler import RowLogprobs, Sampler
from tknp.transport.base import Transport

_PROGRAMS_KEPT = 64
TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Outcome:
    """What a step gave on one rank.

    At the sampling rank `tokens`, `logprobs` and `errors` (row index -> error) follow `slots`;
    elsewhere they are empty.
    """

    delta: Delta
    slots: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    logprobs: tuple[RowLogprobs | None, ...] = ()
    errors: dict[int, TknpError] = field(default_factory=dict)
    seconds: float = 0.0


class DecodeRank:
    """Executes the steps of one stream on one rank.

    `dense`: None on an attention-only node. `attention`, `storage`: None on a root-only node.
    """

    def __init__(
        self,
        layout: Layout,
        rank: Rank,
        transport: Transport,
        *,
        dense: Dense | None,
        attention: DecodeAttention[Any] | None,
        storage: KvStorage | None,
        epoch: int,
        max_batch: int,
        device: torch.device,
        stream: int = 0,
    ) -> None:
        shard = layout.shard(rank)
        self.layout = layout
        self.rank = rank
        self.batch = Batch(epoch, stream, layout.nodes, max_batch)
        self._transport = transport
        self._attention = attention
        self._pages = None
        if storage is not None:
            self._pages = tuple(storage.layer(layer) for layer in range(storage.shape[0]))
        self._device = device
        self._executor = Executor(
            rank, dense, transport,
            widths=(shard.qkv_width, shard.q_width), hidden_size=layout.config.hidden_size,
            dtype=TORCH_DTYPES[layout.dtype], device=device, max_rows=max_batch, stream=stream,
        )  # fmt: skip
        self._owned = OwnedRows(device)
        self._samples = rank == Rank(layout.sampler, 0)
        self._embeds = rank.node == layout.first_root
        self._sampler = Sampler(layout.config.vocab_size, layout.config.eos_ids)
        self._row_states: dict[int, RowState] = {}
        self._tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._order = torch.zeros(0, dtype=torch.int64, device=device)
        self._programs: OrderedDict[tuple[int, ...], Program] = OrderedDict()
        self._mine: list[int] = []
        self._broken: str | None = None

    @property
    def times(self) -> StepTimes:
        """Where the seconds of this rank's steps went."""
        return self._executor.times

    @torch.inference_mode()
    def step(self, delta: Delta) -> Outcome:
        """Run the step that `delta` begins. Raises TknpError; the rank is then broken for good."""
        if self._broken is not None:
            raise ProtocolError(f"rank {self.rank} stopped earlier: {self._broken}")
        try:
            return self._step(delta)
        except Exception as error:
            self._broken = str(error) or type(error).__name__
            self._transport.abort(f"rank {self.rank} failed in step {delta.step}: {self._broken}")
            raise

    def _step(self, delta: Delta) -> Outcome:
        began = perf_counter()
        changed = self.batch.apply(delta)
        for slot in delta.ends:
            self._owned.end(slot)
            self._row_states.pop(slot, None)
        for admit in delta.admits:
            self._admit(admit)
        if changed:
            self._order = torch.tensor(self.batch.order, dtype=torch.int64, device=self._device)
        outcome = _Drawn()
        frame = Frame(
            ids=lambda: self._tokens[self._order],
            attend=self._attend_with(changed),
            draw=lambda logits: self._draw(logits, outcome),
            feedback=self._feed,
        )
        self._executor.run(self._program(), frame)
        self.batch.advance()
        slots = self.batch.order if self._samples else ()
        seconds = perf_counter() - began
        self.times.finish(seconds)
        return Outcome(delta, slots, outcome.tokens, outcome.logprobs, outcome.errors, seconds)

    def _admit(self, admit: Admit) -> None:
        if admit.owner == self.rank.node:
            self._owned.admit(admit.slot, admit.pages)
        if self._embeds:
            self._tokens[admit.slot] = admit.token
        if self._samples:
            history = (
                History(self.layout.config.vocab_size, admit.prompt, admit.generated)
                if admit.sampling.needs_history
                else None
            )
            self._row_states[admit.slot] = RowState(
                admit.sampling, admit.position + 1, admit.generated_count, history
            )

    def _program(self) -> Program:
        counts = self.batch.counts
        program = self._programs.get(counts)
        if program is None:
            program = derive(self.layout, counts, self.rank)
            self._programs[counts] = program
            if len(self._programs) > _PROGRAMS_KEPT:
                self._programs.popitem(last=False)
        else:
            self._programs.move_to_end(counts)
        return program

    def _attend_with(self, changed: bool) -> Callable[[int, Tensor], Tensor]:
        """Attention over this rank's own rows of the step."""
        if changed:
            owner = self.rank.node
            self._mine = [s for s in self.batch.order if self.batch.rows[s].admit.owner == owner]
            self._owned.build(self._mine, [self.batch.rows[s].position for s in self._mine])
        else:
            self._owned.advance()
        if not self._mine:
            return _no_rows
        if self._attention is None or self._pages is None:
            raise ProtocolError(f"rank {self.rank} keeps no KV but was given rows to attend")
        attention, pages = self._attention, self._pages
        plan = attention.plan(self._owned.rows)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            return attention.attend(plan, qkv, *pages[layer])[0]

        return attend

    def _draw(self, logits: Tensor, drawn: _Drawn) -> Tensor:
        states = [self._row_states[slot] for slot in self.batch.order]
        sampled = self._sampler.sample(logits, states)
        for row, state in enumerate(states):
            if row not in sampled.errors:
                state.advance(sampled.tokens[row])
        drawn.tokens = tuple(sampled.tokens)
        drawn.logprobs = tuple(sampled.logprobs)
        drawn.errors = sampled.errors
        # A failed row goes on with any valid id until the coordinator ends it.
        usable = [max(token, 0) for token in sampled.tokens]
        ids = torch.tensor(usable, dtype=torch.int64, device=self._device)
        if self._embeds:
            self._feed(ids)
        return ids

    def _feed(self, ids: Tensor) -> None:
        self._tokens[self._order] = ids


@dataclass
class _Drawn:
    tokens: tuple[int, ...] = ()
    logprobs: tuple[RowLogprobs | None, ...] = ()
    errors: dict[int, TknpError] = field(default_factory=dict)


def _no_rows(layer: int, qkv: Tensor) -> Tensor:
    raise ProtocolError(f"layer {layer}: attention asked for without rows")
