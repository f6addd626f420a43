"""What a gateway replica counts, see the gateway's rows of `tknp.metrics.table`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tknp.metrics import table
from tknp.metrics.instruments import Histogram, Labels
from tknp.metrics.registry import Registry

if TYPE_CHECKING:
    from tknp.gateway.gateway import Gateway
    from tknp.gateway.generation import Piece


class GatewayMetrics:
    """Counters of one replica; gauges are read from `gateway` when somebody scrapes."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.registry = Registry("gateway")
        self._requests = self.registry.counter(table.GATEWAY_REQUESTS)
        self._replays = self.registry.counter(table.GATEWAY_REPLAYS, "not_started", "started")
        self._ttft = self.registry.histogram(table.GATEWAY_TTFT)
        self._gap = self.registry.histogram(table.GATEWAY_CHUNK_GAP)
        self.registry.read(table.GATEWAY_INFLIGHT, lambda: self._tenants("requests"))
        self.registry.read(table.GATEWAY_TOKENS_INFLIGHT, lambda: self._tenants("tokens"))
        self.registry.read(table.GATEWAY_POOLS, self._pools)
        self.registry.ready(lambda: gateway.pools.ready)

    def answered(self, endpoint: str, status: str) -> None:
        """A request to `endpoint` has its status."""
        self._requests.add(1, endpoint, status)

    def replayed(self, stage: str) -> None:
        """A stream is submitted again; `stage`: started or not_started."""
        self._replays.add(1, stage)

    def watch(self, began_s: float, *, gaps: bool) -> StreamWatch:
        """Times the first chunk of one stream that began at `began_s` on time.monotonic, with
        `gaps` the later ones too."""
        return StreamWatch(began_s, self._ttft, self._gap if gaps else None)

    def _tenants(self, value: str) -> dict[Labels, float]:
        return {(t.name,): float(getattr(t.used, value)) for t in self._gateway.keys.tenants}

    def _pools(self) -> dict[Labels, float]:
        upstreams = self._gateway.pools.upstreams
        ready = sum(upstream.ready for upstream in upstreams)
        return {("ready",): float(ready), ("not_ready",): float(len(upstreams) - ready)}


class StreamWatch:
    """Chunks of one stream."""

    def __init__(self, began_s: float, ttft: Histogram, gap: Histogram | None) -> None:
        self._last_s = began_s
        self._first, self._gap = ttft, gap
        self._started = False

    def piece(self, piece: Piece) -> None:
        """`piece` is there now."""
        if not piece.token_ids:
            return
        now_s = time.monotonic()
        histogram = self._gap if self._started else self._first
        if histogram is not None:
            histogram.observe(now_s - self._last_s)
        self._started, self._last_s = True, now_s
