"""Free pages as maximal runs of consecutive ids, so that requests get few long runs.

Attention on CPU reads a run of pages in place as one slice of the pool; scattered pages cost one
call each. Best fit keeps long runs whole; a request larger than every run takes the longest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator


class FreeRuns:
    """A set of page ids kept as sorted, disjoint, non-adjacent runs [start, stop)."""

    def __init__(self, start: int, stop: int) -> None:
        self._starts = [start] if start < stop else []
        self._stops = [stop] if start < stop else []
        self._count = max(0, stop - start)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.runs():
            yield from range(start, stop)

    def runs(self) -> list[tuple[int, int]]:
        """Every run as (start, stop), ascending."""
        return list(zip(self._starts, self._stops, strict=True))

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove and return `count` pages, the caller having checked that so many are free.

        `after`: prefer the run that starts right behind this page (growth of a holding).
        """
        taken: list[int] = []
        if after is not None:
            taken += self._take_from(bisect_left(self._starts, after + 1), after + 1, count)
        while len(taken) < count:
            index = self._best_fit(count - len(taken))
            taken += self._take_from(index, self._starts[index], count - len(taken))
        return taken

    def give(self, pages: Iterable[int]) -> None:
        """Add pages that are not in the set; neighbours coalesce."""
        for page in pages:
            index = bisect_left(self._starts, page)
            joins_left = index > 0 and self._stops[index - 1] == page
            joins_right = index < len(self._starts) and self._starts[index] == page + 1
            if joins_left and joins_right:
                self._stops[index - 1] = self._stops[index]
                del self._starts[index], self._stops[index]
            elif joins_left:
                self._stops[index - 1] = page + 1
            elif joins_right:
                self._starts[index] = page
            else:
                self._starts.insert(index, page)
                self._stops.insert(index, page + 1)
            self._count += 1

    def _best_fit(self, count: int) -> int:
        """Index of the shortest run of at least `count` pages, else of the longest run."""
        lengths = [stop - start for start, stop in self.runs()]
        fitting = [i for i, length in enumerate(lengths) if length >= count]
        if fitting:
            return min(fitting, key=lengths.__getitem__)
        return max(range(len(lengths)), key=lengths.__getitem__)

    def _take_from(self, index: int, start: int, count: int) -> list[int]:
        """Up to `count` pages of run `index` if that run begins at `start`, else none."""
        if index >= len(self._starts) or self._starts[index] != start:
            return []
        stop = min(start + count, self._stops[index])
        if stop == self._stops[index]:
            del self._starts[index], self._stops[index]
        else:
            self._starts[index] = stop
        self._count -= stop - start
        return list(range(start, stop))
