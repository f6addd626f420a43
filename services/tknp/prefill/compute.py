"""One rank of a prefill replica: weights, scratch pages, and the chunks it runs.

A rank runs chunks one after another on its compute thread. The pages of a request are local
scratch of the owner's page size, so that a page here is a page there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from tknp.engine.backend import ChunkAttention, whole_chunk_layers
from tknp.engine.executor import Executor, Frame
from tknp.engine.runs import Run, RunLayers, pieces
from tknp.engine.thread import EngineThread
from tknp.errors import TknpError
from tknp.kernels.layers import Ran
from tknp.kernels.prefill import KernelPrefillLayers
from tknp.kv.storage import KvStorage
from tknp.layout.layout import Layout
from tknp.layout.prefill import derive_chunk
from tknp.layout.program import Op
from tknp.layout.rank import Rank
from tknp.metrics.instruments import Histogram
from tknp.model.dense import Dense
from tknp.prefill.layer_calls import in_calls
from tknp.sampling.grammar import Grammars
from tknp.sampling.history import RowState
from tknp.sampling.params import SamplingParams
from tknp.sampling.sampler import RowLogprobs, Sampler
from tknp.transfer.base import Push
from tknp.transport.base import Transport, Work
from tknp.worker.memory import computing

log = logging.getLogger(__name__)
_CLOSE_S = 2.0
_LESS_MEMORY = "set a smaller prefill_chunk, or give this rank more memory"


@dataclass(frozen=True)
class Drawn:
    """The first token of a request, at TP rank 0."""

    token: int
    logprobs: RowLogprobs | None = None
    error: TknpError | None = None


@dataclass(frozen=True)
class Chunk:
    """Tokens `ids` at positions start, start + 1, ... of a prompt whose KV lies in local `pages`.

    `row`: how to draw the first token; on the last chunk only.
    """

    ids: Sequence[int]
    start: int
    pages: Sequence[int]
    push: Push
    row: RowState | None = None


class PrefillRank:
    """`transport` joins the ranks of the replica. One thread runs chunks.

    `broken(reason)`: called on that thread when the ranks are out of step for good: a chunk failed
    on one of several. `submitted`, `finished`, `layers`: chunks and their layers so far.
    `seconds`: observes each chunk that is computed. `keep_cores`: called on that thread at first,
    to keep what computes in place; returns the cores.
    """

    def __init__(
        self,
        layout: Layout,
        t: int,
        transport: Transport,
        *,
        dense: Dense,
        attention: ChunkAttention,
        storage: KvStorage,
        max_chunk: int,
        device: torch.device,
        broken: Callable[[str], None],
        seconds: Histogram,
        keep_cores: Callable[[], tuple[int, ...]] | None = None,
    ) -> None:
        self.storage = storage
        self.submitted = 0
        self.finished = 0
        self.layers = 0
        self._broken = broken
        self._seconds = seconds
        self._layout = layout
        self._t = t
        self._device = device
        self._transport = transport
        self._attention = attention
        kept = {layer: storage.layer(layer) for layer in range(layout.config.layers)}
        self._layers = whole_chunk_layers(dense, attention, kept)
        self._sampler = Sampler(layout.config.vocab_size, layout.config.eos_ids)
        self._executor = Executor(
            layout, Rank(0, t), dense, transport, device=device, max_rows=max_chunk
        )
        self._thread = EngineThread(f"prefill-{t}")
        if keep_cores is not None:
            self._thread.post(partial(_keep, keep_cores))

    def submit(self, chunk: Chunk) -> Future[Drawn | None]:
        """Queue a chunk; its result is the first token, at TP rank 0 and on the last chunk.

        Fails with CapacityError where there is no memory to compute it.
        """
        self.submitted += 1
        return self._thread.submit(self._guarded, chunk)

    def close(self) -> None:
        self._transport.abort("shutting down")
        self._transport.close()
        self._thread.close(_CLOSE_S)

    def _guarded(self, chunk: Chunk) -> Drawn | None:
        try:
            with computing(f"a chunk of {len(chunk.ids)} tokens", self._device, _LESS_MEMORY):
                return self._run(chunk)
        except Exception as error:
            if self._layout.tp > 1:  # the other ranks are somewhere else in this chunk
                reason = f"prefill rank {self._t} failed in a chunk: {error}"
                self._transport.abort(reason)
                self._broken(reason)
            raise
        finally:
            self.finished += 1

    @torch.inference_mode()
    def _run(self, chunk: Chunk) -> Drawn | None:
        began = perf_counter()
        last = chunk.row is not None
        stop = chunk.start + len(chunk.ids)
        table = torch.tensor(chunk.pages, dtype=torch.int32, device=self._device)
        ids = torch.tensor(chunk.ids, dtype=torch.int64, device=self._device)
        drawn: list[Drawn] = []

        def attend(op: Op, qkv: Tensor) -> tuple[Tensor, None]:
            pages = self.storage.layer(op.layer)
            out = self._attention.attend(qkv, chunk.start, table, *pages)
            computed(op.layer)
            return out, None

        def computed(layer: int) -> None:
            # A broken transfer is reported by `finish`. Stopping here would leave the other ranks
            # of the replica waiting in the collectives of this chunk.
            with suppress(TknpError):
                chunk.push.push(layer, chunk.start, stop)
            self.layers += 1

        def draw(logits: Tensor) -> Tensor:
            if chunk.row is not None:
                drawn.append(self._draw(logits, chunk.row))
            return ids[:1]

        program = derive_chunk(self._layout, len(ids), self._t, last=last)
        layers: RunLayers | None = None
        if self._layers is not None:
            layers = partial(_in_calls, self._layers, chunk, table, computed)
        frame = Frame(lambda: ids, attend, draw, lambda _: None, layers)
        self._executor.run(pieces(program, _alone) if layers else program, frame)
        self._seconds.observe(perf_counter() - began)
        return drawn[0] if drawn else None

    def _draw(self, logits: Tensor, row: RowState) -> Drawn:
        sampled = self._sampler.sample(logits, [row])
        return Drawn(sampled.tokens[0], sampled.logprobs[0], sampled.errors.get(0))


def _in_calls(
    whole: KernelPrefillLayers,
    chunk: Chunk,
    table: Tensor,
    computed: Callable[[int], None],
    run: Run,
    x: Tensor,
) -> Generator[Work, None, Ran]:
    yield from ()  # there are no peers to be waited for
    seconds = in_calls(run.layers, whole.chunk(x, chunk.start, table), computed)
    return Ran(x, seconds, [0.0] * len(seconds), None)


def _alone(op: Op) -> bool:
    """Whether nothing of `op` is sent or received."""
    return not (op.sends or op.recvs or op.partial)


def _keep(keep_cores: Callable[[], tuple[int, ...]]) -> None:
    cores = keep_cores()
    if cores:
        log.info("threads that compute stay on cores %s, one each", cores)


def first_row(
    params: SamplingParams,
    vocab_size: int,
    prompt: Sequence[int],
    generated: int,
    grammars: Grammars | None = None,
) -> RowState:
    """State before the token after `prompt`, whose last `generated` ids came from a replay."""
    at = len(prompt) - generated
    return RowState.at(params, vocab_size, prompt[:at], prompt[at:], grammars)
