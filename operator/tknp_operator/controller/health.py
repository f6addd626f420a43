"""The operator's own port: /metrics, /healthz (it runs), /readyz (it has seen the cluster)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from tknp.errors import Unavailable


def serve(port: int, registry: CollectorRegistry, ready: Callable[[], bool]) -> None:
    """Serve in a thread until the process ends; port 0: nothing. Raises Unavailable if taken."""
    if not port:
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif self.path in ("/healthz", "/readyz"):
                well = self.path == "/healthz" or ready()
                self._answer(200 if well else 503, b"ok\n" if well else b"not ready\n")
            else:
                self._answer(404, b"not found\n")

        def _answer(self, code: int, body: bytes, kind: str = "text/plain") -> None:
            self.send_response(code)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Probes are no news."""

    try:
        server = ThreadingHTTPServer(("", port), Handler)
    except OSError as error:
        raise Unavailable(f"port {port} can't be listened on: {error.strerror}") from error
    threading.Thread(target=server.serve_forever, name="health", daemon=True).start()
