"""Runs one rank's program on tensors. The only loop over operations there is.

    ids --Embed--> x
    x --Project--> qkv --Scatter--> owners: Attend --Gather--> attention --Finish--> x   each layer
    x --Sample--> ids --Feedback--> ranks that embed

x is the residual stream, float32 [rows, D]; it already contains the last layer's hidden state, so
a handoff carries the one tensor where the paper's implementation carries two.

An operation starts, yields what has to be waited for, if anything, and completes. Whoever drives
the generator waits: `run` by blocking, `tknp.engine.lanes` by going on with another stream, also
where a computation is about to begin (TURN). What is sent is kept alive until the next send, which
waits for it; by then its receiver has usually answered.

What differs between decode and prefill is passed in as a Frame: where ids come from, what
attention does, and how a token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from tknp.engine.recorder import Recorder
from tknp.engine.runs import Piece, Run, RunLayers
from tknp.engine.sequence import SequenceOperations
from tknp.engine.tensors import Tensors
from tknp.engine.times import StepTimes
from tknp.engine.turn import TURN
from tknp.errors import ProtocolError
from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Transfer
from tknp.layout.rank import Rank
from tknp.layout.turns import DENSE
from tknp.model.dense import Dense
from tknp.transport.base import Message, Transport, Work

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


_COMPUTES = DENSE | {Kind.ATTEND}
_Start = Callable[[Op], Work | None]
_Complete = Callable[[Op], None]


@dataclass(frozen=True)
class Frame:
    """What one execution works on.

    ids        -> int64 [rows], called at ranks that embed
    attend     op, qkv [its rows, W] -> [its rows, Hq_t dh] and, if op.partial, LSE [its rows, Hq_t]
    draw       logits float32 [rows, vocabulary] -> int64 [rows], called at the sampling rank
    feedback   int64 [rows], the ids drawn, called at the other ranks that embed
    layers     what computes a Run; needed only where programs have such pieces
    """

    ids: Callable[[], Tensor]
    attend: Callable[[Op, Tensor], tuple[Tensor, Tensor | None]]
    draw: Callable[[Tensor], Tensor]
    feedback: Callable[[Tensor], None]
    layers: RunLayers | None = None


class Executor:
    """One stream of one rank. One thread uses it.

    `dense` is None on an attention-only node. `max_rows`: largest batch. `turns`: give way to other
    streams before computations, and within the longest one. `at`: the operation under way.
    """

    def __init__(
        self,
        layout: Layout,
        rank: Rank,
        dense: Dense | None,
        transport: Transport,
        *,
        device: torch.device,
        max_rows: int,
        stream: int = 0,
        recorder: Recorder | None = None,
        turns: bool = False,
    ) -> None:
        self._rank = rank
        self._dense = dense
        self._turns = turns
        self._transport = transport
        self._stream = stream
        self._recorder = recorder or Recorder()
        self._tensors = Tensors(layout.heads(rank), TORCH_DTYPES[layout.dtype], device, max_rows)
        self._sending: tuple[Work, list[Message]] | None = None
        self.at: Op | None = None
        self.times = StepTimes("owner" if dense is None else "root")
        divided = SequenceOperations(layout, rank, self._tensors, transport, stream)
        # What starts an operation, and what completes it once that was waited for.
        self._table: dict[Kind, tuple[_Start, _Complete | None]] = {
            Kind.EMBED: (self._embed, None),
            Kind.PROJECT: (self._project, None),
            Kind.SCATTER: (self._scatter, self._scattered),
            Kind.QUERY: (divided.start_query, divided.complete_query),
            Kind.ATTEND: (self._attend, None),
            Kind.GATHER: (self._gather, None),
            Kind.EXCHANGE: (divided.start_exchange, None),
            Kind.MERGE: (divided.start_merge, divided.complete_merge),
            Kind.LSE_GATHER: (divided.start_lse_gather, divided.complete_lse_gather),
            Kind.REDUCE_SCATTER: (divided.start_reduce_scatter, divided.complete_reduce_scatter),
            Kind.FINISH: (self._finish, None),
            Kind.OUTPUT: (self._output, None),
            Kind.MLP: (self._mlp, None),
            Kind.ALL_REDUCE: (self._all_reduce, self._reduced),
            Kind.HANDOFF: (self._handoff, None),
            Kind.SAMPLE: (self._sample, self._sampled),
            Kind.FEEDBACK: (self._feedback, self._fed_back),
        }

    def run(self, program: Sequence[Piece], frame: Frame) -> None:
        """Execute `program`; every operation is added to `times`, the caller finishes the step."""
        for work in self.steps(program, frame):
            work.wait()

    def steps(self, program: Sequence[Piece], frame: Frame) -> Iterator[Work]:
        """The same, piece by piece: go on once what was yielded has been waited for."""
        table, times, recorder = self._table, self.times, self._recorder
        self._frame = frame
        began = perf_counter()
        for op in program:
            if isinstance(op, Run):
                yield from self._run(op, began)
                began = perf_counter()
                continue
            self.at = op
            waited = 0.0
            if self._turns and op.kind in _COMPUTES:
                waited += yield from _waited(TURN)
                if op.kind is Kind.SAMPLE:
                    waited += yield from self._head(op)
            if op.sends and self._sending is not None:
                waited += yield from _waited(self._sending[0])
                self._sending = None
            start, complete = table[op.kind]
            work = start(op)
            if work is not None:
                waited += yield from _waited(work)
            if complete is not None:
                complete(op)
            now = perf_counter()
            times.add(op, now - began, waited)
            if recorder.on:
                recorder.add(self._stream, op, began, now - began, waited)
            began = now
        if self._sending is not None and self.at is not None:
            yield self._sending[0]
            self._sending = None
            waited = perf_counter() - began
            times.add(self.at, waited, waited)

    def _run(self, run: Run, began: float) -> Generator[Work, None, None]:
        """Whole layers: their operations are timed where they are run."""
        self.at = run.ops[0]
        if self._frame.layers is None:
            raise ProtocolError("nothing here computes whole layers but the program has some")
        waited = 0.0
        if self._turns and run.roots:
            waited += yield from _waited(TURN)
        if run.exchanges and self._sending is not None:
            waited += yield from _waited(self._sending[0])
            self._sending = None
        ran = yield from self._frame.layers(run, self._tensors.x)
        self._tensors.x = ran.x
        if ran.sending is not None:
            self._sending = ran.sending, []
        seconds, waits = ran.seconds, ran.waits
        seconds[0] += waited
        waits[0] += waited
        for stage, op in enumerate(run.stages):
            each = slice(stage, None, len(run.stages))
            self.times.add(op, sum(seconds[each]), sum(waits[each]))
        if self._recorder.on:
            for op, spent, of_them in zip(run.ops, seconds, waits, strict=True):
                self._recorder.add(self._stream, op, began, spent, of_them)
                began += spent

    @property
    def dense(self) -> Dense:
        if self._dense is None:
            raise ProtocolError(f"rank {self._rank} holds no weights but its program needs them")
        return self._dense

    def _embed(self, op: Op) -> None:
        self._tensors.x = self._tensors.partial = self.dense.embed(self._frame.ids())

    def _project(self, op: Op) -> None:
        self._tensors.qkv = self.dense.project(op.layer, self._tensors.x)

    def _scatter(self, op: Op) -> Work | None:
        tensors = self._tensors
        if op.sends:
            tensors.attention = tensors.attention_rows[: op.stop]
            qkv = tensors.qkv
            self._send([(t.dst, _rows(qkv, t)) for t in op.sends])
            return None
        tensors.qkv = tensors.qkv_rows
        return self._receive([(t.src, self._arrives(t)) for t in op.recvs])

    def _arrives(self, t: Transfer) -> Tensor:
        """Whole QKV rows arrive where attention reads them, queries apart."""
        tensors = self._tensors
        return tensors.qkv_rows[t.start : t.stop] if t.what == "qkv" else tensors.arrives(t)

    def _scattered(self, op: Op) -> None:
        for t in op.recvs:
            if t.what == "q":
                self._tensors.qkv_rows[t.start : t.stop, : t.width] = self._tensors.arrives(t)

    def _attend(self, op: Op) -> None:
        tensors = self._tensors
        qkv, start, stop = tensors.qkv, op.start, op.stop
        if stop - start == qkv.shape[0]:  # everything this rank has is its own
            out, lse = self._frame.attend(op, qkv)
            tensors.attention = out
        else:
            out, lse = self._frame.attend(op, qkv[start:stop])
            if qkv is not tensors.qkv_rows and not op.partial:
                tensors.attention[start:stop] = out
        tensors.outs[op.start] = out, lse

    def _gather(self, op: Op) -> Work | None:
        tensors = self._tensors
        if op.sends:
            self._send([(t.dst, self._gathered(t)) for t in op.sends])
            return None
        partial = {t.start for t in op.recvs if t.what == "lse"}
        return self._receive(
            [
                (
                    t.src,
                    tensors.arrives(t)
                    if t.start in partial
                    else tensors.attention[t.start : t.stop],
                )
                for t in op.recvs
            ]
        )

    def _gathered(self, t: Transfer) -> Tensor:
        if t.what == "lse":
            return self._tensors.out_of(t.start)[1].contiguous()
        return self._tensors.outs[t.start][0]

    def _finish(self, op: Op) -> None:
        self._keep(op)
        tensors = self._tensors
        tensors.x = self.dense.finish(op.layer, tensors.x, tensors.attention)

    def _output(self, op: Op) -> None:
        self._keep(op)
        self._tensors.partial = self.dense.output(op.layer, self._tensors.attention)

    def _mlp(self, op: Op) -> None:
        self._tensors.partial = self.dense.mlp(op.layer, self._tensors.x)

    def _all_reduce(self, op: Op) -> Work:
        return self._transport.all_reduce(
            self._tensors.partial, stream=self._stream, scope=op.scope
        )

    def _reduced(self, op: Op) -> None:
        tensors = self._tensors
        if tensors.partial is not tensors.x:
            tensors.x = tensors.x + tensors.partial

    def _handoff(self, op: Op) -> Work | None:
        tensors = self._tensors
        if op.sends:
            self._send([(op.sends[0].dst, tensors.x)])
            return None
        tensors.x = tensors.arrives(op.recvs[0])
        return self._receive([(op.recvs[0].src, tensors.x)])

    def _head(self, op: Op) -> Generator[Work, None, float]:
        """Logits of a SAMPLE in pieces; returns the seconds that other streams took in between."""
        self._keep(op)
        waited, parts = 0.0, []
        for part in self.dense.head_parts(self._tensors.x):
            parts.append(part)
            waited += yield from _waited(TURN)
        self._logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return waited

    def _sample(self, op: Op) -> Work | None:
        tensors = self._tensors
        if not self._turns:
            self._keep(op)
            self._logits = self.dense.head(tensors.x)
        if op.sends:
            self._send([(t.dst, self._logits) for t in op.sends])
        elif op.recvs:
            return self._receive([(t.src, tensors.arrives(t)) for t in op.recvs])
        return None

    def _sampled(self, op: Op) -> None:
        if op.sends:
            return
        logits = self._logits
        if op.recvs:
            logits = torch.cat([logits, *(self._tensors.arrives(t) for t in op.recvs)], dim=-1)
        self._tensors.ids = self._frame.draw(logits)

    def _feedback(self, op: Op) -> Work | None:
        if op.sends:
            ids = self._tensors.ids.unsqueeze(-1)
            self._send([(t.dst, ids) for t in op.sends])
            return None
        (t,) = op.recvs
        return self._receive([(t.src, self._tensors.arrives(t))])

    def _fed_back(self, op: Op) -> None:
        if op.recvs:
            self._frame.feedback(self._tensors.arrives(op.recvs[0]).squeeze(-1))

    def _keep(self, op: Op) -> None:
        """Leave behind the rows that no operation from `op` on needs."""
        tensors = self._tensors
        if tensors.x.shape[0] != op.rows:
            tensors.x = tensors.x[op.start : op.stop]
            tensors.attention = tensors.attention[op.start : op.stop]

    def _send(self, messages: list[Message]) -> None:
        work = self._transport.post(messages, [], stream=self._stream)
        self._sending = work, messages

    def _receive(self, messages: list[Message]) -> Work:
        return self._transport.post([], messages, stream=self._stream)


def _waited(work: Work) -> Generator[Work, None, float]:
    """Yield `work`; returns the seconds until the step went on."""
    before = perf_counter()
    yield work
    return perf_counter() - before


def _rows(qkv: Tensor, t: Transfer) -> Tensor:
    """Rows of a SCATTER: whole ones, or the queries alone, which are not contiguous."""
    rows = qkv[t.start : t.stop]
    return rows if t.what == "qkv" else rows[:, : t.width].contiguous()
