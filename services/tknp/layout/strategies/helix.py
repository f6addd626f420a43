"""Helix: KVP sequence shards of TPA ranks, TPA at most Hkv; dense work over all KVP TPA ranks.

Every rank projects the whole QKV row of its heads, so that nothing is gathered before attention;
one all-to-all over query heads carries outputs and LSE together; `overlap` above 1 cuts the batch
so that one part's exchange runs under the next one's attention (HOP-B).
"""

from __future__ import annotations

from tknp.layout.strategies import sequence
from tknp.layout.strategies.base import Asked, Grid, NodeSpec, Placement
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import DType, ModelConfig


class Helix:
    """`kvp` sequence shards; TPA is what remains of the ranks."""

    options = frozenset({"kvp", "overlap", "inside"})
    divides: Divides = "tokens"
    spread = True

    def grid(self, config: ModelConfig, asked: Asked) -> Grid:
        return sequence.choose(config, asked, Strategy.HELIX, sequence.divisible)

    def check(self, config: ModelConfig, grid: Grid, specs: list[NodeSpec]) -> None:
        sequence.check(config, grid, specs, sequence.divisible)

    def place(
        self, config: ModelConfig, dtype: DType, grid: Grid, specs: list[NodeSpec]
    ) -> Placement:
        return sequence.place(config, grid)
