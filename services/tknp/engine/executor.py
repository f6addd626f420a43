"""Runs one rank's program on tensors. The only loop over operations there is.

    ids --Embed--> x
    x --Project--> qkv --Scatter--> owners: Attend --Gather--> attention --Finish--> x   each layer
    x --Sample--> ids --Feedback--> first root

x is the residual stream, float32 [rows, D]; it already contains the last layer's hidden state, so
a handoff carries the one tensor where the paper's implementation carries two. Receive buffers are
allocated once and reused every layer; what is sent is kept alive until the send has completed.

What differs between decode and prefill is passed in as a Frame: where ids come from, what
attention does, and how a token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from tknp.engine.times import StepTimes
from tknp.errors import ProtocolError
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.model.dense import Dense
from tknp.transport.base import Message, Transport, Work


@dataclass(frozen=True)
class Frame:
    """What one execution works on.

    ids        -> int64 [rows], called at the ranks of the first root
    attend     layer, qkv [own rows, W] -> [own rows, Hq_t dh], called at owners
    draw       logits float32 [rows, vocabulary] -> int64 [rows], called at the sampling rank
    feedback   int64 [rows], the ids drawn, called at the ranks of the first root
    """

    ids: Callable[[], Tensor]
    attend: Callable[[int, Tensor], Tensor]
    draw: Callable[[Tensor], Tensor]
    feedback: Callable[[Tensor], None]


class Executor:
    """One stream of one rank. One thread uses it.

    `dense` is None on an attention-only node. `widths`: elements of a QKV row and of an attention
    row on this rank. `max_rows`: largest batch.
    """

    def __init__(
        self,
        rank: Rank,
        dense: Dense | None,
        transport: Transport,
        *,
        widths: tuple[int, int],
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        stream: int = 0,
    ) -> None:
        self._rank = rank
        self._dense = dense
        self._transport = transport
        self._stream = stream
        self._qkv_in = torch.empty(max_rows, widths[0], dtype=dtype, device=device)
        self._attention_in = torch.empty(max_rows, widths[1], dtype=dtype, device=device)
        self._x_in = torch.empty(max_rows, hidden_size, dtype=torch.float32, device=device)
        self._ids_in = torch.empty(max_rows, 1, dtype=torch.int64, device=device)
        self._x = self._qkv = self._attention = self._partial = self._ids = torch.empty(0)
        self._sending: tuple[Work, tuple[Message, ...]] | None = None
        self._waited = 0.0
        self.times = StepTimes("owner" if dense is None else "root")
        self._run: dict[Kind, Callable[[Op, Frame], None]] = {
            Kind.EMBED: self._embed,
            Kind.PROJECT: self._project,
            Kind.SCATTER: self._scatter,
            Kind.ATTEND: self._attend,
            Kind.GATHER: self._gather,
            Kind.FINISH: self._finish,
            Kind.OUTPUT: self._output,
            Kind.MLP: self._mlp,
            Kind.ALL_REDUCE: self._all_reduce,
            Kind.HANDOFF: self._handoff,
            Kind.SAMPLE: self._sample,
            Kind.FEEDBACK: self._feedback,
        }

    def run(self, program: Program, frame: Frame) -> None:
        """Execute `program`; every operation is added to `times`, the caller finishes the step."""
        began = perf_counter()
        for op in program:
            self._waited = 0.0
            self._run[op.kind](op, frame)
            now = perf_counter()
            self.times.add(op, now - began, self._waited)
            began = now
        self._waited = 0.0
        self._settle()
        if program:
            self.times.add(program[-1], self._waited, self._waited)

    @property
    def dense(self) -> Dense:
        if self._dense is None:
            raise ProtocolError(f"rank {self._rank} holds no weights but its program needs them")
        return self._dense

    def _embed(self, op: Op, frame: Frame) -> None:
        self._x = self._partial = self.dense.embed(frame.ids())

    def _project(self, op: Op, frame: Frame) -> None:
        self._qkv = self.dense.project(op.layer, self._x)

    def _scatter(self, op: Op, frame: Frame) -> None:
        if op.sends:
            self._attention = self._attention_in[: op.stop]
            self._send([(t.dst, self._qkv[t.start : t.stop]) for t in op.sends])
        else:
            self._qkv = self._qkv_in[: op.rows]
            self._receive([(op.recvs[0].src, self._qkv)])

    def _attend(self, op: Op, frame: Frame) -> None:
        if self._qkv.shape[0] == op.rows:  # everything this rank has is its own
            self._attention = frame.attend(op.layer, self._qkv)
        else:
            own = frame.attend(op.layer, self._qkv[op.start : op.stop])
            self._attention[op.start : op.stop] = own

    def _gather(self, op: Op, frame: Frame) -> None:
        if op.sends:
            self._send([(op.sends[0].dst, self._attention)])
        else:
            self._receive([(t.src, self._attention[t.start : t.stop]) for t in op.recvs])

    def _finish(self, op: Op, frame: Frame) -> None:
        self._x = self.dense.finish(op.layer, self._x, self._attention)

    def _output(self, op: Op, frame: Frame) -> None:
        self._partial = self.dense.output(op.layer, self._attention)

    def _mlp(self, op: Op, frame: Frame) -> None:
        self._partial = self.dense.mlp(op.layer, self._x)

    def _all_reduce(self, op: Op, frame: Frame) -> None:
        self._transport.all_reduce(self._partial, stream=self._stream)
        if self._partial is not self._x:
            self._x = self._x + self._partial

    def _handoff(self, op: Op, frame: Frame) -> None:
        if op.sends:
            self._send([(op.sends[0].dst, self._x)])
        else:
            self._x = self._x_in[: op.rows]
            self._receive([(op.recvs[0].src, self._x)])

    def _sample(self, op: Op, frame: Frame) -> None:
        logits = self.dense.head(self._x[op.start : op.stop])
        if op.sends:
            self._send(self._messages(op.sends, logits))
            return
        slices = [logits.new_empty(t.shape) for t in op.recvs]
        if slices:
            sources = [t.src for t in op.recvs]
            self._receive(list(zip(sources, slices, strict=True)))
            logits = torch.cat([logits, *slices], dim=-1)
        self._ids = frame.draw(logits)

    def _feedback(self, op: Op, frame: Frame) -> None:
        if op.sends:
            self._send(self._messages(op.sends, self._ids.unsqueeze(-1)))
        else:
            ids = self._ids_in[: op.rows]
            self._receive([(op.recvs[0].src, ids)])
            frame.feedback(ids.squeeze(-1))

    @staticmethod
    def _messages(transfers: tuple[Transfer, ...], tensor: Tensor) -> list[Message]:
        return [(t.dst, tensor) for t in transfers]

    def _send(self, messages: list[Message]) -> None:
        self._settle()
        work = self._transport.post(messages, [], stream=self._stream)
        self._sending = work, tuple(messages)

    def _receive(self, messages: list[Message]) -> None:
        self._wait(self._transport.post([], messages, stream=self._stream))

    def _settle(self) -> None:
        """Wait for the last send. By then its receiver has usually answered."""
        if self._sending is not None:
            self._wait(self._sending[0])
            self._sending = None

    def _wait(self, work: Work) -> None:
        began = perf_counter()
        work.wait()
        self._waited += perf_counter() - began
