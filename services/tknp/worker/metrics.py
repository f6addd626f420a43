"""What one decode rank measures; see `tknp.metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tknp.engine.times import parts_of
from tknp.metrics import table
from tknp.metrics.instruments import Labels
from tknp.metrics.registry import Registry
from tknp.v1.common_pb2 import Phase

if TYPE_CHECKING:
    from tknp.worker.runtime import DecodeRuntime


class RankMetrics:
    """`runtime` is read at every scrape. Roots keep no pages, so they expose none."""

    def __init__(self, runtime: DecodeRuntime) -> None:
        self._runtime = runtime
        role = runtime.pool.config.nodes[runtime.rank.node].role
        services: tuple[table.Service, ...] = (
            ("decode-root", "attention-owner") if role == "decode-node" else (role,)
        )
        self._node, self._rank = str(runtime.rank.node), str(runtime.rank.t)
        self.registry = registry = Registry(*services)
        self.steps = registry.histogram(table.STEP, self._node, self._rank)
        registry.ready(lambda: runtime.life.phase == Phase.PHASE_READY)
        registry.read(table.STEP_PART, self._parts)
        registry.read(table.EXCHANGE_BYTES, self._sent)
        registry.read(table.WEIGHT_BYTES, lambda: self._here(runtime.life.total_bytes))
        if table.PAGES in registry:
            registry.read(table.LEASES_EXPIRED, self._expired)
            registry.read(table.PAGES, self._pages)
            registry.read(
                table.KV_BYTES,
                lambda: self._here(runtime.storage.nbytes if runtime.storage else 0),
            )

    def _here(self, value: float) -> dict[Labels, float]:
        return {(self._node, self._rank): value}

    def _parts(self) -> dict[Labels, float]:
        parts = parts_of(self._runtime.times)
        return {(self._node, self._rank, *place): seconds for place, seconds in parts.items()}

    def _sent(self) -> dict[Labels, float]:
        sent = self._runtime.sent_bytes
        return {(self._node, self._rank, scope): nbytes for scope, nbytes in vars(sent).items()}

    def _expired(self) -> dict[Labels, float]:
        books = self._runtime.books
        return {(self._node,): books.expired} if books is not None else {}

    def _pages(self) -> dict[Labels, float]:
        books = self._runtime.books
        counts = books.counts() if books is not None else {}
        return {(self._node, state.value): pages for state, pages in counts.items()}
