"""Data parallelism: every node holds the whole model and is a pool of its own, one stream each."""

from __future__ import annotations

from tknp.layout.blocks import Block
from tknp.layout.strategies.base import Asked, Grid, NodeSpec, Placement, check_whole
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import DType, ModelConfig
from tknp.model.shard import check_tp


class Dp:
    """Stream s runs on node s alone; nothing crosses nodes."""

    options: frozenset[str] = frozenset()
    divides: Divides = "tokens"
    spread = False

    def grid(self, config: ModelConfig, asked: Asked) -> Grid:
        return Grid(
            Strategy.DP, asked.nodes, asked.tp, microbatches=asked.nodes, domain_ranks=asked.tp
        )

    def check(self, config: ModelConfig, grid: Grid, specs: list[NodeSpec]) -> None:
        check_tp("tp", config, grid.tp)
        check_whole(Strategy.DP, specs)

    def place(
        self, config: ModelConfig, dtype: DType, grid: Grid, specs: list[NodeSpec]
    ) -> Placement:
        nodes = range(grid.nodes)
        whole = (Block(0, config.layers, embedding=True, head=True),)
        return Placement(
            (whole,) * grid.nodes,
            tuple((n,) * config.layers for n in nodes),
            tuple((n,) for n in nodes),
        )
