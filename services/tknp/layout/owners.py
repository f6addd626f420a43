"""Which node owns a request, and in which order the rows of a step stand.

Source: Decode Token Parallelism, section 4.2, capacity-aware request assignment. An owner is the
eligible node with the lowest KV load; eligible is a node whose free pages hold the whole input and
the expected output on every TP rank (pages are the same on all ranks of a node).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeLoad:
    """`pages`: that node n can give to requests. `used`: of them, reserved or live."""

    pages: int
    used: int

    @property
    def free(self) -> int:
        return self.pages - self.used


def choose_owner(loads: Sequence[NodeLoad], need: int) -> int | None:
    """Node with the lowest KV load that has `need` free pages, or None: the request waits."""
    eligible = [n for n, load in enumerate(loads) if load.free >= need]
    return min(eligible, key=lambda n: (loads[n].used, n), default=None)


def fits_ever(loads: Sequence[NodeLoad], need: int) -> bool:
    """Whether some node could hold `need` pages once it is empty."""
    return any(load.pages >= need for load in loads)


def owner_major(owners: Mapping[int, int], nodes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of a step from {slot: owner}: slots by owner and then by slot, and rows of each node."""
    order = tuple(sorted(owners, key=lambda slot: (owners[slot], slot)))
    counts = [0] * nodes
    for owner in owners.values():
        counts[owner] += 1
    return order, tuple(counts)
