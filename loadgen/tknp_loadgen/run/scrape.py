"""Scraping a server's Prometheus endpoints before, during and after a run."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tknp_loadgen.errors import TargetError
from tknp_loadgen.measure.server import parse_text

TIMEOUT_S = 5.0


def fetch(url: str) -> dict[str, float]:
    """One scrape; raises TargetError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return parse_text(answer.read().decode())
    except (OSError, urllib.error.URLError, ValueError) as error:
        raise TargetError(f"{url} can't be scraped: {error}") from error


class Scraper:
    """Writes a line a scrape while its context is open: one before, some during, one after.

    An endpoint that can't be read at the start is an error; later failures leave gaps. Times count
    from release, so what was scraped before waits for `begin`.
    """

    def __init__(self, urls: Sequence[str], path: Path, interval_s: float) -> None:
        self._urls, self._path, self._interval_s = urls, path, interval_s
        self._task: asyncio.Task[None] | None = None
        self._release_ns: int | None = None
        self._early: list[tuple[int, str, dict[str, float]]] = []

    async def __aenter__(self) -> Self:
        if self._urls:
            self._path.unlink(missing_ok=True)
            await self._round(strict=True)
            self._task = asyncio.create_task(self._rounds())
        return self

    async def look(self) -> None:
        """Scrape now: after warm-up, before release, so that counters are of the run alone."""
        await self._round(strict=False)

    def begin(self, release_ns: int) -> None:
        """The moment of release is known."""
        self._release_ns = release_ns
        for at_ns, url, samples in self._early:
            self._write(at_ns, url, samples)
        self._early.clear()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            await self._round(strict=False)

    async def _rounds(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._round(strict=False)

    async def _round(self, strict: bool) -> None:
        for url in self._urls:
            try:
                samples = await asyncio.to_thread(fetch, url)
            except TargetError:
                if strict:
                    raise
                continue
            if self._release_ns is None:
                self._early.append((time.monotonic_ns(), url, samples))
            else:
                self._write(time.monotonic_ns(), url, samples)

    def _write(self, at_ns: int, url: str, samples: dict[str, float]) -> None:
        at_s = round((at_ns - (self._release_ns or at_ns)) / 1e9, 6)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"at_s": at_s, "url": url, "samples": samples}) + "\n")
