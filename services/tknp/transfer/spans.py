"""How a KvChunk's payload lies in its pages; both sides read it here. Pure: no torch.

pages     |   . . 2 3  |  0 1 2 3  |  0 1 2 3  |  0 1 . .  |      first_slot=2, slots=2
spans        [first]     [     whole pages    ]   [last]
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Slots [first_slot, last_slot) of the chunk's pages [start, stop), page by page."""

    start: int
    stop: int
    first_slot: int
    last_slot: int

    @property
    def tokens(self) -> int:
        return (self.stop - self.start) * (self.last_slot - self.first_slot)


def spans(pages: int, first_slot: int, slots: int, page_size: int) -> list[Span]:
    """Up to three spans of a chunk of `pages` pages, in the order of its payload.

    The first page is filled from `first_slot` on, the last one before slot `slots`.
    """
    if pages == 1:
        return [Span(0, 1, first_slot, slots)]
    first, last = int(first_slot > 0), pages - int(slots < page_size)
    found = [
        Span(0, first, first_slot, page_size),
        Span(first, last, 0, page_size),
        Span(last, pages, 0, slots),
    ]
    return [span for span in found if span.tokens]
