"""The sending side of a stream: what is put goes out in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Outbox(Generic[T]):
    """An async iterator that gRPC reads requests from. Belongs to one event loop."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[T | None] = asyncio.Queue()

    def put(self, message: T) -> None:
        self._queue.put_nowait(message)

    def close(self) -> None:
        """No more will follow."""
        self._queue.put_nowait(None)

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        message = await self._queue.get()
        if message is None:
            raise StopAsyncIteration
        return message
