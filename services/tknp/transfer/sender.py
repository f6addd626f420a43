"""A push as one link to each owner rank that keeps part of what this prefill rank computes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from tknp.errors import InvalidValue, ProtocolError, TknpError
from tknp.model.shard import Shard
from tknp.transfer.base import Kind, Link, Path
from tknp.transfer.plan import Route, reach, routes
from tknp.v1.common_pb2 import Placement, RequestKey

_T = TypeVar("_T")


class RoutedPush:
    """Implements Push over links. `tokens`: what the local pages and the owners both hold."""

    def __init__(self, links: Sequence[Link], layers: range, local: int, kept: int) -> None:
        self._links = links
        self._layers = layers
        self._local = local
        self._kept = kept
        self._failure: TknpError | None = None

    def push(self, layer: int, start: int, stop: int) -> None:
        try:
            self._push(layer, start, stop)
        except TknpError as error:
            self._failure = self._failure or error
            raise

    async def finish(self) -> int:
        if self._failure is not None:
            raise self._failure
        return sum(await _all([link.finish() for link in self._links]))

    async def abort(self) -> None:
        await _all([link.abort() for link in self._links])

    def _push(self, layer: int, start: int, stop: int) -> None:
        if layer not in self._layers:
            raise InvalidValue(
                "layer", layer, f"this rank computes [{self._layers.start}, {self._layers.stop})"
            )
        if not 0 <= start <= stop <= self._local:
            raise InvalidValue(
                "stop", stop, f"tokens [{start}, {stop}) are not within the {self._local} tokens "
                "of the local pages",
            )  # fmt: skip
        if stop > self._kept:
            raise ProtocolError(
                f"no owner keeps every head of tokens [{max(start, self._kept)}, {stop}); "
                "reserve pages for the whole prompt"
            )
        for link in self._links:
            link.send(layer, start, stop)


class RoutedSender:
    """Implements Sender: `path` moves the bytes, of the storage that `shard` was computed into."""

    def __init__(self, kind: Kind, path: Path, shard: Shard, page_size: int) -> None:
        self.kind = kind
        self._path = path
        self._shard = shard
        self._page_size = page_size

    async def open(
        self,
        key: RequestKey,
        epoch: int,
        writer: str,
        placements: Sequence[Placement],
        owners: Sequence[str],
        pages: Sequence[int],
    ) -> RoutedPush:
        if len(owners) != len(placements):
            raise InvalidValue("owners", len(owners), f"give one a placement: {len(placements)}")
        found = routes(self._shard, placements, self._page_size)
        links: list[Link] = []

        async def make(route: Route) -> None:
            owner = owners[route.index]
            links.append(await self._path.link(key, epoch, writer, route, owner, pages))

        try:
            async with asyncio.TaskGroup() as group:
                for route in found:
                    group.create_task(make(route))
        except BaseException as error:
            await _all([link.abort() for link in links])
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        local = len(pages) * self._page_size
        return RoutedPush(links, self._shard.layers, local, reach(self._shard, found))

    async def close(self) -> None:
        await self._path.close()


async def _all(calls: Sequence[Awaitable[_T]]) -> list[_T]:
    """Wait for every call, then raise the first error there was."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
