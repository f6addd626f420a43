"""What one rank of a prefill replica measures; see `tknp.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tknp.metrics import table
from tknp.metrics.instruments import reason_of
from tknp.metrics.registry import Registry
from tknp.v1.common_pb2 import Phase

if TYPE_CHECKING:
    from tknp.prefill.runtime import PrefillRuntime


class PrefillMetrics:
    """`runtime` is read at every scrape. TP rank 0 measures prompts, every rank its chunks."""

    def __init__(self, runtime: PrefillRuntime, replica: int) -> None:
        self._runtime = runtime
        self._replica, rank = str(replica), str(runtime.t)
        self.registry = registry = Registry("prefill")
        self.chunks = registry.histogram(table.PREFILL_CHUNK, self._replica, rank)
        registry.ready(lambda: runtime.life.phase == Phase.PHASE_READY)
        registry.read(
            table.PREFILL_REQUESTS,
            lambda: {(self._replica, rank): len(runtime.requests) if runtime.requests else 0},
        )
        self._tokens = registry.counter(table.PREFILL_TOKENS)
        self._bytes = registry.counter(table.TRANSFER_BYTES)
        self._aborted = registry.counter(table.TRANSFERS_ABORTED)
        self._compute = registry.histogram(table.PREFILL_COMPUTE, self._replica)
        self._transfer = registry.histogram(table.TRANSFER, self._replica)

    def delivered(self, tokens: int, compute_s: float, transfer_s: float, nbytes: int) -> None:
        """The owners have the KV of a prompt of `tokens`. At TP rank 0."""
        self._tokens.add(tokens, self._replica)
        self._compute.observe(compute_s)
        self._transfer.observe(transfer_s)
        self._bytes.add(nbytes, self._replica, self._runtime.kv_transfer)

    def aborted(self, error: BaseException) -> None:
        """A prompt was given up because of `error`."""
        self._aborted.add(1, self._replica, reason_of(error))
