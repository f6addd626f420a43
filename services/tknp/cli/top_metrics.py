"""Reads the coordinator's metrics for `tknp top`.

address given               HOST:PORT or a URL: it must answer
none given                  port 9400 of the pool's host, if metrics of a coordinator are there
"""

from __future__ import annotations

import asyncio
import ssl
import urllib.request
from collections import defaultdict
from urllib.error import URLError

from tknp.cli.top_figures import GENERATED, Scrape
from tknp.errors import InvalidValue, Unavailable

USUAL_PORT = 9400
_ASK_S = 3.0
_MOST_BYTES = 16 << 20


def context_of(ca: str | None, cert: str | None, key: str | None) -> ssl.SSLContext | None:
    """TLS with a client's certificate, which the metrics ports ask for; None without files.

    Raises InvalidValue for a file that can't be read.
    """
    if not any((ca, cert, key)):
        return None
    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidValue(
            "metrics certificate", cert or ca, f"can't be read: {error}; give PEM files"
        ) from error
    return context


class MetricsReader:
    """Scrapes one address. `address` empty: looks for one beside `target` at the first scrape."""

    def __init__(self, address: str, target: str, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._required = bool(address)
        host = target.rpartition(":")[0].rpartition("/")[2]
        self._url: str | None = self._at(address or f"{host}:{USUAL_PORT}")

    def _at(self, address: str) -> str:
        scheme = "https" if self._tls is not None else "http"
        url = address if "://" in address else f"{scheme}://{address}"
        if not url.startswith(("http://", "https://")):
            raise InvalidValue("metrics", address, "give HOST:PORT or an http(s) URL")
        return url if url.partition("://")[2].count("/") else f"{url}/metrics"

    async def scrape(self) -> Scrape | None:
        """The metrics, or None where none were given and none found. Raises Unavailable."""
        if self._url is None:
            return None
        try:
            scrape = parsed(await asyncio.to_thread(self._get, self._url))
        except (OSError, ValueError) as error:
            if not self._required:
                self._url = None
                return None
            reason = error.reason if isinstance(error, URLError) else error
            raise Unavailable(f"no metrics from {self._url}: {reason}") from error
        if GENERATED not in scrape.counters:
            if self._required:
                raise Unavailable(f"{self._url} has no metrics of a coordinator")
            self._url = None
            return None
        self._required = True
        return scrape

    def _get(self, url: str) -> str:
        with urllib.request.urlopen(url, timeout=_ASK_S, context=self._tls) as response:
            data: bytes = response.read(_MOST_BYTES)
            return data.decode()


def parsed(text: str) -> Scrape:
    """Counters and buckets of Prometheus text, label values summed up. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    counters: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if family.type == "counter":
                counters[sample.name] += sample.value
            elif family.type == "histogram" and sample.name.endswith("_bucket"):
                buckets[family.name][float(sample.labels["le"])] += sample.value
    return Scrape(dict(counters), {name: dict(counts) for name, counts in buckets.items()})
