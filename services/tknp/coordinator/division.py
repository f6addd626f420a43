"""How the nodes of a pool divide the KV of one request, and the pages that takes. Pure.

tokens   every owner keeps some of the tokens, of all layers: one owner of any, or several
         (width k, DCP, Helix), see `tknp.layout.shares`
layers   every node keeps all tokens of the layers it roots (PP)
heads    the ranks of the one node do (TP)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tknp.kv.size import pages_for
from tknp.layout.layout import Layout
from tknp.layout.shares import Shares
from tknp.layout.strategy import Divides


@dataclass(frozen=True)
class Division:
    """`streams`: nodes that may keep KV of each stream's requests.

    `width`: most owners of one request. `together`: each request is kept by all owners of its
    stream. `page_size`, `interleave`: tokens.
    """

    page_size: int
    streams: tuple[tuple[int, ...], ...]
    width: int = 1
    together: bool = False
    divides: Divides = "tokens"
    interleave: int = 16

    @classmethod
    def of(cls, layout: Layout, page_size: int) -> Division:
        return cls(
            page_size, layout.owners, layout.width, layout.spread or layout.divides == "layers",
            layout.divides, layout.interleave,
        )  # fmt: skip

    def shares(self, owners: Sequence[int], prompt: int) -> Shares:
        """How `owners` divide a request of whose tokens prefill computes `prompt`."""
        divided = tuple(owners) if self.divides == "tokens" else tuple(owners[:1])
        return Shares(divided, prompt, self.interleave, unit=self.page_size)

    def pages(self, owners: Sequence[int], shares: Shares, tokens: int) -> list[int]:
        """Pages that each of `owners` needs for `tokens` of the request; at least one."""
        if self.divides == "tokens" and len(owners) > 1:
            kept = [shares.length(shard, tokens) for shard in range(len(owners))]
        else:
            kept = [tokens] * len(owners)
        return [max(1, pages_for(count, self.page_size)) for count in kept]

    def most_pages(self, width: int, prompt: int, tokens: int) -> int:
        """Pages that the fullest of `width` owners needs for `tokens`, of which `prompt` come."""
        owners = range(width)
        if self.divides != "tokens" or width == 1:
            return max(1, pages_for(tokens, self.page_size))
        return max(self.pages(owners, self.shares(owners, prompt), tokens))

    def covered(self, shares: Shares, held: Sequence[int], most: int) -> int:
        """First position of a request that `held` pages of its owners have no room for.

        At most `most`, which says that there is room for all.
        """
        slots = [pages * self.page_size for pages in held]
        if self.divides != "tokens" or len(slots) == 1:
            return min(most, *slots)

        def short(tokens: int) -> bool:
            return any(shares.length(i, tokens) > room for i, room in enumerate(slots))

        if not short(most):
            return most
        low, high = min(shares.prompt, most), most - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (low, middle - 1) if short(middle) else (middle, high)
        return low

    def fewest_owners(self, pages: Sequence[int], prompt: int, tokens: int) -> int | None:
        """Owners of a request in a pool that holds nothing else; None: it could never be placed.

        `pages`: of every node. `prompt`: of its `tokens`, how many prefill computes.
        """
        widths = [
            self.fewest_owners_in(stream, pages, prompt, tokens)
            for stream in range(len(self.streams))
        ]
        return min((width for width in widths if width is not None), default=None)

    def names_capacity(self, pages: Sequence[int]) -> str:
        """What limits the longest request, in words."""
        kept = [sorted((pages[n] for n in owners), reverse=True) for owners in self.streams]
        if self.divides == "layers":
            return f"the KV pages of the fullest node hold {self._tokens(min(map(min, kept)))}"
        width = len(kept[0]) if self.together else min(self.width, len(kept[0]))
        if width == 1:
            return f"the KV pages of one node hold {self._tokens(max(k[0] for k in kept))}"
        most = max(k * of[k - 1] for of in kept for k in range(1, width + 1))
        return f"the KV pages of {width} nodes, a request's most owners, hold {self._tokens(most)}"

    def fewest_owners_in(
        self, stream: int, pages: Sequence[int], prompt: int, tokens: int
    ) -> int | None:
        """As `fewest_owners`, on the owners of one stream."""
        owners = self.streams[stream]
        largest = sorted((pages[n] for n in owners), reverse=True)
        if not self.together and largest[0] >= pages_for(tokens, self.page_size):
            return 1
        most = len(owners)
        widths = (most,) if self.together else range(2, min(self.width, most) + 1)
        for width in widths:
            if self.most_pages(width, prompt, tokens) <= largest[width - 1]:
                return width
        return None

    def _tokens(self, pages: int) -> str:
        return f"{pages * self.page_size} tokens"
