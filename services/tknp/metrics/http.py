"""GET /metrics of one process, by prometheus_client's HTTP server.

    scraper --HTTP--> thread of the server --call--> event loop: Registry.collect
                      thread of the server <-families-
    scraper <-- text or OpenMetrics, by what it accepts

Families are collected on the event loop, which owns what readers look at, and rendered on the
server's thread. A loop that doesn't answer in time fails the scrape with status 500 and nothing
else. The port shows no prompts and takes no input. With TLS it answers only who shows a certificate
of the CA; without, whoever reaches it.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import Metric as Family

from tknp.errors import DeadlineExceeded, Unavailable
from tknp.metrics.registry import Registry

if TYPE_CHECKING:
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

_SCRAPE_S = 5.0


class MetricsServer:
    """Serves `registry` at HOST:PORT `address`, or nowhere where that is empty.

    `tls`: PEM files of certificate, key, and the CA of those who may read. `start` and `close`
    belong to the event loop whose state the registry reads.
    """

    def __init__(
        self, registry: Registry, address: str, tls: tuple[str, str, str] | None = None
    ) -> None:
        self._registry = registry
        self._address = address
        self._tls = tls
        self._running: tuple[WSGIServer, Thread] | None = None

    def start(self) -> None:
        """Open the port. Raises Unavailable when it is taken or the host isn't this machine's."""
        if not self._address:
            return
        host, _, port = self._address.rpartition(":")
        cert, key, ca = self._tls or (None, None, None)
        collectors = CollectorRegistry()
        collectors.register(_OnLoop(self._registry, asyncio.get_running_loop()))
        try:
            self._running = start_http_server(
                int(port), host.strip("[]"), collectors, certfile=cert, keyfile=key,
                client_cafile=ca, client_auth_required=ca is not None,
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(f"cannot serve metrics on {self._address}: {error}") from error
        listener = self._running[0].socket
        if isinstance(listener, ssl.SSLSocket):
            # Else a client that is silent after connecting holds up all others, and `close`.
            listener.do_handshake_on_connect = False  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Close the port, within half a second. Scrapes under way may be cut short."""
        if self._running is not None:
            server, thread = self._running
            self._running = None
            await asyncio.to_thread(server.shutdown)
            server.server_close()
            await asyncio.to_thread(thread.join)


class _OnLoop:
    """Collects on `loop` whatever thread asks."""

    def __init__(self, registry: Registry, loop: asyncio.AbstractEventLoop) -> None:
        self._registry = registry
        self._loop = loop

    def describe(self) -> Iterable[Family]:
        return self._registry.describe()

    def collect(self) -> Iterable[Family]:
        collected = asyncio.run_coroutine_threadsafe(self._families(), self._loop)
        try:
            return collected.result(_SCRAPE_S)
        except TimeoutError:
            collected.cancel()
            raise DeadlineExceeded(
                f"no metrics within {_SCRAPE_S} s: the process is busy"
            ) from None

    async def _families(self) -> list[Family]:
        return list(self._registry.collect())
