"""Tensor parallelism over all ranks of all nodes: one logical node.

Heads are divided over the ranks; beyond Hkv ranks several of them keep the same KV head, so that
capacity stops growing, and all-reduces cross machines.
"""

from __future__ import annotations

from tknp.errors import InvalidValue
from tknp.layout.blocks import Block
from tknp.layout.strategies.base import (
    Asked,
    Grid,
    NodeSpec,
    Placement,
    check_whole,
    nearest_nodes,
)
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import DType, ModelConfig
from tknp.model.shard import check_tp, legal_tp


class Tp:
    """`nodes` machines of `tp` ranks become one node of nodes x tp."""

    options: frozenset[str] = frozenset()
    divides: Divides = "heads"
    spread = False

    def grid(self, config: ModelConfig, asked: Asked) -> Grid:
        legal = legal_tp(config)
        if asked.nodes * asked.tp not in legal:
            remedy = nearest_nodes(asked.nodes, lambda n: n * asked.tp in legal)
            raise InvalidValue(
                "nodes", asked.nodes,
                f"tp runs over all {asked.nodes * asked.tp} ranks, which must divide "
                f"{config.q_heads} query heads, {config.kv_heads} KV heads (or be a multiple of "
                f"them) and {config.intermediate_size} MLP columns; {remedy}",
            )  # fmt: skip
        return Grid(Strategy.TP, 1, asked.nodes * asked.tp, domain_ranks=asked.tp)

    def check(self, config: ModelConfig, grid: Grid, specs: list[NodeSpec]) -> None:
        check_tp("tp", config, grid.tp)
        check_whole(Strategy.TP, specs)
        if grid.nodes != 1:
            raise InvalidValue(
                "nodes", grid.nodes, "tp is one logical node that holds the ranks of all machines"
            )

    def place(
        self, config: ModelConfig, dtype: DType, grid: Grid, specs: list[NodeSpec]
    ) -> Placement:
        whole = (Block(0, config.layers, embedding=True, head=True),)
        return Placement((whole,), ((0,) * config.layers,), ((0,),))
