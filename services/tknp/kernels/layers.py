"""Whole layers of a decode step in one call, bfloat16, with the messages that their rows take.

    root     x -> project -> send qkv rows -> attend to own -> receive outputs -> finish -> x
    owner         receive qkv rows -> attend -> send outputs

Results are bitwise those of the operations one by one. What is saved is a call and a wake-up of the
computing threads for each of them, and what Python takes between a message and what follows.

Life of a run: `prepare` once for rows that stay, then `run` each step. The call, which is yielded
(`together.py`), releases the GIL and returns after the last layer, or with the stage whose messages
are not through: after 2 ms of waiting, during which it has left the core to others but for the
first 5 us; when this rank or a peer is lost; when what arrived is not what was expected. The
exchange is then waited for as that of a single operation (`exchange.py`), by whoever drives the
generator: there deadlines and lost peers are looked after and errors come from. Then the call goes
on behind that stage.

Between two runs nothing is under way but what was sent last, which `run` hands out and which has to
be waited for before the next. A buffer is written again only when what was sent from it has been
copied out: whatever is received waits for that, too. It can: who answers has read the question.

One thread uses an instance.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Mapping, Sequence
from ctypes import addressof, c_double, c_void_p
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tknp.errors import InvalidValue
from tknp.kernels.decode import KernelDecodeAttention, KernelPlan, check_pages
from tknp.kernels.dense import KernelDense
from tknp.kernels.exchange import MOVES, Mailbox, Messages
from tknp.kernels.library import Layers, Run, Stage, load
from tknp.kernels.together import LayersCall
from tknp.layout.program import Kind, Op
from tknp.model.dense import check_whole
from tknp.model.shard import Shard
from tknp.transport.base import Work

_PROJECT, _SEND, _RECEIVE, _ATTEND, _FINISH = range(5)  # csrc/layers.h
_COMPUTES = {Kind.PROJECT: _PROJECT, Kind.ATTEND: _ATTEND, Kind.FINISH: _FINISH}
_DENSE = (Kind.PROJECT, Kind.FINISH)
_EXCHANGES = (Kind.SCATTER, Kind.GATHER)


@dataclass(frozen=True)
class Ran:
    """What a run gave: x, and of every operation its seconds, and how many of them it waited.

    `sending`: what was sent last, if it is not through.
    """

    x: Tensor
    seconds: list[float]
    waits: list[float]
    sending: Work | None


@dataclass(frozen=True)
class Prepared:
    """A run as the kernels take it: `call` points into `arrays`, `messages`, `seconds`, `waits`."""

    stages: tuple[Op, ...]
    call: Run
    messages: Messages
    seconds: ctypes.Array[c_double]
    waits: ctypes.Array[c_double]
    arrays: tuple[ctypes.Array[Any], ...]

    @property
    def rows(self) -> int | None:
        """Rows of the residual stream; None where it is not touched."""
        return next((op.rows for op in self.stages if op.kind in _DENSE), None)

    @property
    def attended(self) -> Op | None:
        """The operation on rows whose pages are here."""
        return next((op for op in self.stages if op.kind is Kind.ATTEND), None)

    @property
    def sent(self) -> int:
        """How many layers have sent what they send."""
        whole, stage = divmod(int(self.call.at), len(self.stages))
        return whole + any(op.sends for op in self.stages[:stage])


class KernelLayers:
    """Layers of a rank with `heads`, in steps of up to `max_rows` rows.

    `dense`: what holds their weights, block by block. `attention`, and `pages`: keys and values of
    each layer that is attended to. `mailbox`: what moves rows between ranks. Operations for which
    the rank lacks these are not taken.

    InvalidValue for pages that `attention` doesn't take, or where `dense` is one of several ranks.
    """

    def __init__(
        self,
        heads: Shard,
        dense: Sequence[KernelDense],
        attention: KernelDecodeAttention | None,
        pages: Mapping[int, tuple[Tensor, Tensor]],
        *,
        max_rows: int,
        mailbox: Mailbox | None = None,
    ) -> None:
        self._library = load()
        self._dense, self._attention, self._mailbox = dense, attention, mailbox
        self._pages = dict(pages) if attention is not None else {}
        self._hidden = heads.config.hidden_size
        self._weights: dict[int, int] = {}
        for block in dense:
            check_whole(block.shard)
            for layer in block.shard.layers:
                self._weights[layer] = addressof(block.packed(layer))
        if attention is not None:
            no_rows = torch.empty(0, attention.shape.qkv_width, dtype=torch.bfloat16)
            for k, v in self._pages.values():
                check_pages(attention.shape, no_rows, 0, k, v, -1)
        counts = (min(len(k), len(v)) for k, v in self._pages.values())
        self._page_count = min(counts, default=0)
        self._qkv = torch.zeros(max_rows, heads.qkv_width, dtype=torch.bfloat16)
        self._out = torch.zeros(max_rows, heads.q_width, dtype=torch.bfloat16)
        self._lse = torch.zeros(max_rows, len(heads.q_heads))

    def takes(self, op: Op) -> bool:
        """Whether `op` may be part of a run."""
        return self._takes(op, op.layer)

    def prepare(self, layers: range, stages: Sequence[Op]) -> Prepared:
        """A run of `stages`, the operations of each of `layers`.

        InvalidValue for operations that are not taken, or more rows than there is room for.
        """
        self._check(layers, stages)
        messages = Messages(self._mailbox, stages, {"qkv": self._qkv, "attention": self._out})
        pattern = (Stage * len(stages))()
        for at, op in enumerate(stages):
            first = messages.ends[at - 1] if at else 0
            pattern[at] = Stage(_work(op), op.start, op.stop, first, messages.ends[at])
        seconds, waits = ((c_double * (len(layers) * len(stages)))() for _ in range(2))
        weights, keys, values = (
            _array([self._weights.get(layer) for layer in layers]),
            *(_array([self._address(layer, which) for layer in layers]) for which in (0, 1)),
        )
        call = Run(
            Layers(len(layers), addressof(weights), addressof(keys), addressof(values)),
            len(stages), 0, 0, addressof(pattern),
            addressof(self._dense[0].shape) if self._dense else None,
            None if self._attention is None else addressof(self._attention.heads),
            None, messages.lane, addressof(messages.parts), len(messages), None,
            self._qkv.data_ptr(), self._out.data_ptr(), self._lse.data_ptr(),
            addressof(seconds), addressof(waits), 0, 0,
        )  # fmt: skip
        arrays = (pattern, weights, keys, values)
        return Prepared(tuple(stages), call, messages, seconds, waits, arrays)

    def run(
        self, prepared: Prepared, plan: KernelPlan | None, x: Tensor
    ) -> Generator[Work, None, Ran]:
        """x float32 [rows, D] through the layers of `prepared`, each appending to its pages.

        `plan`: of the rows that are attended to. x is reused; where nothing is projected it may be
        anything. InvalidValue if x, or `plan` and the pages don't fit; else raises as `Work.wait`.
        """
        call, seconds, waits = prepared.call, prepared.seconds, prepared.waits
        call.step = self._step(prepared.attended, plan)
        call.rows = prepared.rows or 0
        if prepared.rows is not None:
            x = self._residual(x, prepared.rows)
            call.x = x.data_ptr()
        ctypes.memset(seconds, 0, ctypes.sizeof(seconds))
        ctypes.memset(waits, 0, ctypes.sizeof(waits))
        call.at, last = 0, len(seconds)
        try:
            while True:
                call.begun = call.since_ns = 0
                yield LayersCall(self._library, call)
                left = prepared.messages.rest()
                if call.at == last:
                    return Ran(x, seconds[:], waits[:], left[0] if left else None)
                before = perf_counter()
                yield from left
                waited = perf_counter() - before
                seconds[call.at] += waited
                waits[call.at] += waited
                call.at += 1
        finally:
            prepared.messages.count(prepared.sent)

    def _takes(self, op: Op, layer: int) -> bool:
        if op.kind in _DENSE:
            return layer in self._weights
        if op.kind is Kind.ATTEND:
            return layer in self._pages and not op.partial
        moves = all(transfer.what in MOVES for transfer in (*op.sends, *op.recvs))
        return op.kind in _EXCHANGES and self._mailbox is not None and moves

    def _check(self, layers: range, stages: Sequence[Op]) -> None:
        for layer in layers:
            for op in stages:
                if not self._takes(op, layer):
                    held = f"weights of {list(self._weights)} and pages of {list(self._pages)}"
                    raise InvalidValue("layers", layers, f"{op.kind}: this rank has {held}")
        most = max(op.stop for op in stages)
        if most > len(self._qkv):
            raise InvalidValue("rows", most, f"there is room for max_rows={len(self._qkv)}")

    def _residual(self, x: Tensor, rows: int) -> Tensor:
        expected = rows, self._hidden
        if x.dtype != torch.float32 or x.shape != expected:
            remedy = f"the residual stream is float32 {list(expected)}"
            raise InvalidValue("x", (x.dtype, tuple(x.shape)), remedy)
        return x.contiguous()

    def _step(self, op: Op | None, plan: KernelPlan | None) -> int | None:
        if op is None:
            return None
        if plan is None or plan.rows != op.rows:
            found = None if plan is None else plan.rows
            raise InvalidValue("plan.rows", found, f"attention is to {op.rows} rows")
        if plan.highest_page >= self._page_count:
            remedy = f"there are {self._page_count} pages"
            raise InvalidValue("block_tables", plan.highest_page, remedy)
        return addressof(plan.step)

    def _address(self, layer: int, which: int) -> int | None:
        """Of a layer's keys (0) or values (1)."""
        return self._pages[layer][which].data_ptr() if layer in self._pages else None


def _work(op: Op) -> int:
    """What the kernels call `op`."""
    return _COMPUTES.get(op.kind, _SEND if op.sends else _RECEIVE)


def _array(addresses: list[int | None]) -> ctypes.Array[c_void_p]:
    return (c_void_p * len(addresses))(*addresses)
