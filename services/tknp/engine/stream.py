"""One stream on one rank: its batch, its rows here, the state of its samplers, its programs.

    begin(delta)        apply it; this rank's rows follow
    program             of this rank for the rows as they stand
    frame(drawn)        what the executor works on: ids, attention over own rows, draws
    end                 every row stands one token further

What streams of a rank share (weights, pages, transport) belongs to `tknp.engine.decode`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tknp.attention.base import DecodeAttention
from tknp.engine.batch import Admit, Batch, Delta
from tknp.engine.executor import Frame
from tknp.engine.owned import OwnedRow, OwnedRows
from tknp.engine.runs import Piece, Run, pieces
from tknp.errors import ProtocolError, TknpError
from tknp.kernels.layers import KernelLayers, Prepared, Ran
from tknp.layout.derive import derive
from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.sampling.grammar import Grammars
from tknp.sampling.history import History, RowState
from tknp.sampling.sampler import RowLogprobs, Sampler
from tknp.transport.base import Work

_PROGRAMS_KEPT = 64
Pages = tuple[Tensor, Tensor]
"""Keys and values of one layer."""


@dataclass
class Drawn:
    """What the sampling rank drew, row by row; `errors`: row index -> why it has no token."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[RowLogprobs | None, ...] = ()
    errors: dict[int, TknpError] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """A program, and the runs of rows that its ATTEND operations name.

    `runs`: the whole layers in it, as they are run.
    """

    program: tuple[Piece, ...]
    attends: tuple[tuple[int, int], ...]
    runs: dict[Run, Prepared] = field(default_factory=dict)


class StreamState:
    """`pages`: of each layer kept here. `attention` and `pages` are None on a root-only node.

    `layers`: what runs whole layers in one go.
    `grammars`: where schemas are asked for, at the rank that samples.
    """

    def __init__(
        self,
        layout: Layout,
        rank: Rank,
        stream: int,
        *,
        attention: DecodeAttention[Any] | None,
        pages: dict[int, Pages] | None,
        epoch: int,
        max_batch: int,
        device: torch.device,
        grammars: Grammars | None = None,
        layers: KernelLayers | None = None,
    ) -> None:
        self.batch = Batch(epoch, layout, max_batch, stream)
        self.samples = rank == Rank(layout.sampler(stream), 0)
        self._layout = layout
        self._rank = rank
        self._embeds = layout.embeds(stream, rank)
        self._attention = attention
        self._pages = pages or {}
        self._layers = layers
        self._device = device
        self._sampler = Sampler(layout.config.vocab_size, layout.config.eos_ids)
        self._grammars = grammars
        self._row_states: dict[int, RowState] = {}
        self._tokens = torch.zeros(max_batch, dtype=torch.int64, device=device)
        self._order = torch.zeros(0, dtype=torch.int64, device=device)
        self._owned = OwnedRows(device)
        self._owned_at: dict[int, int] = {}  # row of the batch -> row among the owned
        self._planned: OrderedDict[tuple[Group, ...], Planned] = OrderedDict()
        self._now = Planned((), ())

    @property
    def program(self) -> tuple[Piece, ...]:
        """This rank's program for the batch as it stands."""
        return self._now.program

    def begin(self, delta: Delta) -> None:
        """Apply `delta`. Raises ProtocolError or InvalidValue before anything changes."""
        changed = self.batch.apply(delta)
        for slot in delta.ends:
            self._owned.end(slot)
            self._row_states.pop(slot, None)
        for grow in delta.grows:
            if self._rank.node in self.batch.rows[grow.slot].owners:
                self._owned.admit(grow.slot, grow.pages)
        for admit in delta.admits:
            self._admit(admit)
        if changed:
            self._order = torch.tensor(self.batch.order, dtype=torch.int64, device=self._device)
            self._now = self._plan()
            self._own()
        else:
            self._owned.advance()
            self._turn()

    def end(self) -> None:
        """The step that `begin` began is over."""
        self.batch.advance()

    def frame(self, drawn: Drawn) -> Frame:
        """What the executor works on in this step; draws land in `drawn`."""
        plans = self._attention_plans()
        return Frame(
            ids=lambda: self._tokens[self._order],
            attend=partial(self._attend, plans),
            draw=lambda logits: self._draw(logits, drawn),
            feedback=self._feed,
            layers=partial(self._run_layers, plans),
        )

    def _admit(self, admit: Admit) -> None:
        if self._rank.node in admit.owners:
            self._owned.admit(admit.slot, admit.pages)
        if self._embeds:
            self._tokens[admit.slot] = admit.token
        if self.samples:
            history = (
                History(self._layout.config.vocab_size, admit.prompt, admit.generated)
                if admit.sampling.needs_history
                else None
            )
            schema, grammar = admit.sampling.json_schema, None
            if schema and self._grammars is not None:
                grammar = self._grammars.matcher(schema, admit.generated)
            self._row_states[admit.slot] = RowState(
                admit.sampling, admit.position + 1, admit.generated_count, history, grammar
            )

    def _plan(self) -> Planned:
        groups = self.batch.groups
        planned = self._planned.get(groups)
        if planned is None:
            program = derive(self._layout, self.batch.stream, groups, self._rank)
            attends = {(op.start, op.stop) for op in program if op.kind is Kind.ATTEND}
            planned = Planned(program, tuple(sorted(attends)))
            if self._layers is not None:
                found = pieces(program, self._layers.takes)
                runs = [piece for piece in found if isinstance(piece, Run)]
                prepared = {run: self._layers.prepare(run.layers, run.stages) for run in runs}
                planned = Planned(found, planned.attends, prepared)
            self._planned[groups] = planned
            if len(self._planned) > _PROGRAMS_KEPT:
                self._planned.popitem(last=False)
        else:
            self._planned.move_to_end(groups)
        return planned

    def _own(self) -> None:
        """The rows that this rank attends to have changed."""
        rows = [row for start, stop in self._now.attends for row in range(start, stop)]
        self._owned_at = {row: index for index, row in enumerate(rows)}
        self._owned.build([self._row(self.batch.order[row]) for row in rows])

    def _turn(self) -> None:
        if not self.batch.turned:
            return
        at = {slot: row for row, slot in enumerate(self.batch.order)}
        turned = [(self._owned_at[at[slot]], self._row(slot)) for slot in self.batch.turned]
        self._owned.turn(turned)

    def _row(self, slot: int) -> OwnedRow:
        """What this rank keeps of the request in `slot`."""
        row = self.batch.rows[slot]
        tokens = row.position + 1
        if not row.wide:
            return OwnedRow(slot, row.position, tokens, True)
        node = self._rank.node
        shard = row.shares.owners.index(node)
        return OwnedRow(slot, row.position, row.shares.length(shard, tokens), node == row.appender)

    def _attention_plans(self) -> dict[int, Any]:
        """Of this rank's own rows of the step, by the first row of each run."""
        attends: Sequence[tuple[int, int]] = self._now.attends
        plans: dict[int, Any] = {}
        if not attends:
            return plans
        if self._attention is None:
            raise ProtocolError(f"rank {self._rank} keeps no KV but was given rows to attend")
        for start, stop in attends:
            first = self._owned_at[start]
            plans[start] = self._attention.plan(self._owned.between(first, first + stop - start))
        return plans

    def _attend(self, plans: dict[int, Any], op: Op, qkv: Tensor) -> tuple[Tensor, Tensor]:
        if self._attention is None or op.start not in plans:
            raise ProtocolError(f"layer {op.layer}: attention asked for without rows")
        return self._attention.attend(plans[op.start], qkv, *self._pages[op.layer])

    def _run_layers(self, plans: dict[int, Any], run: Run, x: Tensor) -> Generator[Work, None, Ran]:
        if self._layers is None:
            raise ProtocolError("nothing here runs whole layers but the program has some")
        prepared = self._now.runs[run]
        attended = prepared.attended
        plan = None if attended is None else plans[attended.start]
        return self._layers.run(prepared, plan, x)

    def _draw(self, logits: Tensor, drawn: Drawn) -> Tensor:
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
