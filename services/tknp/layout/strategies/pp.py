"""Pipeline parallelism: a layer's dense work, attention and KV all live on the node that holds it.

Microbatches follow each other through the nodes: as many as nodes fill the pipeline (overlapped),
one is the serial baseline. Every node keeps KV of every request, for its own layers, so blocks are
cut for equal KV budgets a layer.
"""

from __future__ import annotations

from tknp.errors import InvalidValue
from tknp.layout.blocks import cut_pipeline
from tknp.layout.strategies.base import (
    Asked,
    Grid,
    NodeSpec,
    Placement,
    check_roots,
    check_whole,
)
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import DType, ModelConfig
from tknp.model.footprint import footprint
from tknp.model.shard import check_tp


class Pp:
    """One block a node; microbatches default to one a node."""

    options = frozenset({"microbatches"})
    divides: Divides = "layers"
    spread = False

    def grid(self, config: ModelConfig, asked: Asked) -> Grid:
        microbatches = asked.nodes if asked.microbatches is None else asked.microbatches
        return Grid(
            Strategy.PP, asked.nodes, asked.tp, microbatches=microbatches, domain_ranks=asked.tp
        )

    def check(self, config: ModelConfig, grid: Grid, specs: list[NodeSpec]) -> None:
        check_tp("tp", config, grid.tp)
        check_whole(Strategy.PP, specs)
        check_roots(config, specs)
        if grid.microbatches < 1:
            raise InvalidValue(
                "microbatches", grid.microbatches, "a pipeline runs 1 (serial) or more"
            )

    def place(
        self, config: ModelConfig, dtype: DType, grid: Grid, specs: list[NodeSpec]
    ) -> Placement:
        blocks = cut_pipeline(
            footprint(config, dtype, grid.tp),
            [spec.memory_bytes for spec in specs],
            tied=config.tied_embeddings,
        )
        route = tuple(n for n, block in enumerate(blocks) for _ in block.layers)
        nodes = tuple(range(grid.nodes))
        return Placement(
            tuple((block,) for block in blocks),
            (route,) * grid.microbatches,
            (nodes,) * grid.microbatches,
        )
