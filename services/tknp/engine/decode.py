"""One rank of the decode pool: its weights, its pages, its part of every step of its streams.

A step: apply the delta, derive this rank's program, execute it, report. The rank that samples a
stream reports a token for every row; the others report that the step is done. An error breaks the
rank: its transport is aborted so that peers stop waiting, and later steps of any stream are
refused. One thread owns a DecodeRank.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch

from tknp.attention.base import DecodeAttention
from tknp.engine.backend import whole_layers
from tknp.engine.batch import Delta
from tknp.engine.executor import TORCH_DTYPES, Executor
from tknp.engine.recorder import Recorder
from tknp.engine.stream import Drawn, StreamState
from tknp.engine.times import StepTimes
from tknp.errors import InvalidValue, ProtocolError, TknpError
from tknp.kv.storage import KvStorage
from tknp.layout.layout import Layout
from tknp.layout.program import Op
from tknp.layout.rank import Rank
from tknp.model.dense import Dense
from tknp.sampling.grammar import Grammars
from tknp.sampling.sampler import RowLogprobs
from tknp.transport.base import Transport, Work

__all__ = ["TORCH_DTYPES", "DecodeRank", "Outcome"]


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


@dataclass
class _Lane:
    """What belongs to one stream."""

    state: StreamState
    executor: Executor


class DecodeRank:
    """Executes the steps of every stream that this rank's node takes part in.

    `dense`: None on an attention-only node. `attention`, `storage`: None on a root-only node;
    `storage` holds the layers of `layout.kv_layers`. `max_batch`: rows of a step of one stream.
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
        recorder: Recorder | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        self.layout = layout
        self.rank = rank
        self.recorder = recorder or Recorder()
        self._transport = transport
        streams = [s for s in range(layout.streams) if rank.node in layout.members(s)]
        turns = len(streams) > 1 and device.type == "cpu"
        pages = None
        if storage is not None:
            kept = enumerate(layout.kv_layers(rank))
            pages = {layer: storage.layer(index) for index, layer in kept}
        self._lanes = {
            stream: _Lane(
                StreamState(
                    layout, rank, stream, attention=attention, pages=pages, epoch=epoch,
                    max_batch=max_batch, device=device, grammars=grammars,
                    layers=whole_layers(
                        layout.heads(rank), dense, attention, pages,
                        max_rows=max_batch, transport=transport, stream=stream,
                    ),
                ),
                Executor(
                    layout, rank, dense, transport, device=device, max_rows=max_batch,
                    stream=stream, recorder=self.recorder, turns=turns,
                ),
            )
            for stream in streams
        }  # fmt: skip
        self._broken: str | None = None

    @property
    def streams(self) -> tuple[int, ...]:
        """Streams that this rank takes part in."""
        return tuple(self._lanes)

    @property
    def times(self) -> tuple[StepTimes, ...]:
        """Where the seconds of this rank's steps went, stream by stream."""
        return tuple(lane.executor.times for lane in self._lanes.values())

    def at(self, stream: int) -> Op | None:
        """The operation of `stream` that is under way, or was last."""
        return self._lanes[stream].executor.at

    @torch.inference_mode()
    def step(self, delta: Delta) -> Outcome:
        """Run the step that `delta` begins. Raises TknpError; the rank is then broken for good."""
        steps = self.steps(delta)
        try:
            while True:
                next(steps).wait()
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        except Exception as error:
            self.fail(delta, error)
            raise

    def steps(self, delta: Delta) -> Generator[Work, None, Outcome]:
        """The same, piece by piece, in inference mode: go on once what was yielded is waited for.

        Whoever waits calls `fail` when that, or going on, raises.
        """
        if self._broken is not None:
            raise ProtocolError(f"rank {self.rank} stopped earlier: {self._broken}")
        lane = self._lanes.get(delta.stream)
        if lane is None:
            remedy = f"node {self.rank.node} takes part in {self.streams}"
            raise InvalidValue("stream", delta.stream, remedy)
        began = perf_counter()
        self.recorder.enter(delta.stream, delta.step)
        state, executor = lane.state, lane.executor
        state.begin(delta)
        drawn = Drawn()
        yield from executor.steps(state.program, state.frame(drawn))
        state.end()
        slots = state.batch.order if state.samples else ()
        seconds = perf_counter() - began
        executor.times.finish(seconds)
        return Outcome(delta, slots, drawn.tokens, drawn.logprobs, drawn.errors, seconds)

    def fail(self, delta: Delta, error: Exception) -> None:
        """The step of `delta` has raised `error`: nothing more will run here."""
        if self._broken is None:
            self._broken = str(error) or type(error).__name__
            self._transport.abort(f"rank {self.rank} failed in step {delta.step}: {self._broken}")
