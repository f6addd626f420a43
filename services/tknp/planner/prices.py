"""What a simulation asks of a cost model."""

from __future__ import annotations

from typing import Protocol

from tknp.layout.program import Op, Transfer
from tknp.layout.rank import Rank


class Prices(Protocol):
    """Seconds; see `tknp.planner.cost.Costs`."""

    def compute_s(self, rank: Rank, stream: int, op: Op) -> float: ...

    def all_reduce_s(self, op: Op) -> float: ...

    def transfer_s(self, transfer: Transfer) -> tuple[float, float]:
        """Seconds that the links of both ends are held, and seconds of flight after that."""
        ...


class Free:
    """Everything takes no time: for programs whose order alone is in question."""

    def compute_s(self, rank: Rank, stream: int, op: Op) -> float:
        return 0.0

    def all_reduce_s(self, op: Op) -> float:
        return 0.0

    def transfer_s(self, transfer: Transfer) -> tuple[float, float]:
        return 0.0, 0.0
