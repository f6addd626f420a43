"""Names of the GPUs (or CPU workers) of a pool. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Rank:
    """GPU `t` of node `node`; ordered node-major, as the flat index is."""

    node: int
    t: int

    def index(self, tp: int) -> int:
        """Flat index in a pool of TP degree `tp`."""
        return self.node * tp + self.t

    @classmethod
    def from_index(cls, index: int, tp: int) -> Rank:
        """Inverse of `index`."""
        return cls(*divmod(index, tp))

    def __str__(self) -> str:
        return f"({self.node}, {self.t})"
