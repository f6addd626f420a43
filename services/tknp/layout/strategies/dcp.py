"""Decode context parallelism: heads over T ranks, every sequence over N nodes, dense over all N T.

As vLLM has it: the projection is sharded over all ranks, so queries are gathered before attention;
LSE is gathered and corrected outputs are reduce-scattered after it (Decode Token Parallelism,
section 4.4, equation 4).
"""

from __future__ import annotations

from tknp.layout.strategies import sequence
from tknp.layout.strategies.base import Asked, Grid, NodeSpec, Placement
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import DType, ModelConfig


def _fits(config: ModelConfig, shards: int, tp: int) -> bool:
    kv_columns = config.kv_heads // tp * config.head_dim
    return sequence.divisible(config, shards, tp) and kv_columns % shards == 0


class Dcp:
    """`kvp` is the DCP degree; its groups stand across machines, or inside them."""

    options = frozenset({"kvp", "inside"})
    divides: Divides = "tokens"
    spread = True

    def grid(self, config: ModelConfig, asked: Asked) -> Grid:
        return sequence.choose(config, asked, Strategy.DCP, _fits)

    def check(self, config: ModelConfig, grid: Grid, specs: list[NodeSpec]) -> None:
        sequence.check(config, grid, specs, _fits)

    def place(
        self, config: ModelConfig, dtype: DType, grid: Grid, specs: list[NodeSpec]
    ) -> Placement:
        return sequence.place(config, grid)
