"""Pages of every node, as the coordinator counts them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tknp.layout.owners import NodeLoad


class Ledger:
    """`pages`: that each node can give. A page counts from before it is asked for until after it
    has been given back, so that the sum never exceeds what a node has.
    """

    def __init__(self, pages: Sequence[int]) -> None:
        self._pages = pages
        self._used = [0] * len(pages)
        self._withheld = [0] * len(pages)

    @property
    def loads(self) -> list[NodeLoad]:
        """Pages of each node; reserved and withheld ones are used."""
        taken = zip(self._pages, self._used, self._withheld, strict=True)
        return [NodeLoad(pages, used + withheld) for pages, used, withheld in taken]

    def take(self, pages: Mapping[int, int]) -> None:
        """A request gets `pages` of each node."""
        for node, count in pages.items():
            self._used[node] += count

    def give(self, pages: Mapping[int, int]) -> None:
        """A request is done with `pages` of each node."""
        for node, count in pages.items():
            self._used[node] -= count

    def withhold(self, node: int, pages: int) -> None:
        """`node` has `pages` that no request holds and that it can't give either (quarantine)."""
        self._withheld[node] = pages
