"""Requests that wait for pages, in the order in which they are placed. Pure.

Higher priorities go first; within one the order is that of arrival, also for a request that comes
back. Nothing overtakes the head for being smaller, so a request never starves among its equals.
There is no ageing: a priority means what it says, and a steady load of higher ones keeps lower
ones waiting until their deadlines.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from tknp.coordinator.request import Request


class Waiting:
    """A sorted list: the bounded queue is short, and leaving it from the middle is common."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def head(self) -> Request:
        return self._requests[0]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_rank)

    def remove(self, request: Request) -> None:
        """`request` is waiting; it leaves."""
        del self._requests[bisect_left(self._requests, _rank(request), key=_rank)]


def _rank(request: Request) -> tuple[int, int]:
    return -request.priority, request.order
