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
    """Writes a line a scrape while its context is open; the first and the last are always there.

    An endpoint that can't be read at the start is an error; later failures leave gaps.
    """

    def __init__(self, urls: Sequence[str], path: Path, interval_s: float) -> None:
        self._urls, self._path, self._interval_s = urls, path, interval_s
        self._task: asyncio.Task[None] | None = None
        self.release_ns = time.monotonic_ns()

    async def __aenter__(self) -> Self:
        if self._urls:
            self._path.unlink(missing_ok=True)
            await self._round(strict=True)
            self._task = asyncio.create_task(self._rounds())
        return self

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
            at_s = round((time.monotonic_ns() - self.release_ns) / 1e9, 6)
            line = json.dumps({"at_s": at_s, "url": url, "samples": samples})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
