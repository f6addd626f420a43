"""What the two strategies that divide every sequence have in common.

K sequence shards (KVP, the DCP degree) of T ranks (TPA) each: K logical nodes. Dense work runs on
all K T ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from tknp.errors import InvalidValue
from tknp.layout.blocks import Block
from tknp.layout.strategies.base import (
    Asked,
    Grid,
    NodeSpec,
    Placement,
    check_whole,
    nearest,
    nearest_nodes,
)
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig

Fits = Callable[[ModelConfig, int, int], bool]  # model, shards, ranks of a shard


def divisible(config: ModelConfig, shards: int, tp: int) -> bool:
    """Heads without a duplicate over `tp` ranks; MLP and output columns over all ranks."""
    ranks = shards * tp
    columns = config.q_heads // tp * config.head_dim
    return config.kv_heads % tp == 0 and config.intermediate_size % ranks == 0 == columns % shards


def choose(config: ModelConfig, asked: Asked, strategy: Strategy, fits: Fits) -> Grid:
    """The grid of `asked`, whose `kvp` defaults to the machines or the next legal number."""
    ranks = asked.nodes * asked.tp
    legal = _legal(config, ranks, fits)
    if not legal:
        remedy = nearest_nodes(asked.nodes, lambda n: bool(_legal(config, n * asked.tp, fits)))
        raise InvalidValue("nodes", asked.nodes, f"{_reason(config, strategy, ranks)}; {remedy}")
    wanted = asked.nodes if asked.kvp is None else asked.kvp
    shards = min((k for k in legal if k >= wanted), default=legal[-1])
    if asked.kvp is not None and asked.kvp not in legal:
        raise InvalidValue(
            "kvp", asked.kvp, f"{_reason(config, strategy, ranks)}; nearest is "
            f"{nearest(asked.kvp, legal)}",
        )  # fmt: skip
    inside = bool(asked.inside)
    if inside and asked.tp % shards:
        fitting = [k for k in legal if asked.tp % k == 0]
        remedy = f"nearest is kvp {nearest(shards, fitting)}" if fitting else "put them across"
        raise InvalidValue(
            "inside", True, f"{shards} sequence shards don't divide the {asked.tp} ranks of a "
            f"node; {remedy}",
        )  # fmt: skip
    return Grid(
        strategy, shards, ranks // shards, width=shards, overlap=asked.overlap or 1,
        domain_ranks=asked.tp, inside=inside,
    )  # fmt: skip


def check(config: ModelConfig, grid: Grid, specs: list[NodeSpec], fits: Fits) -> None:
    """Refuse a logical grid that can't be cut so."""
    check_whole(grid.strategy, specs)
    ranks = grid.nodes * grid.tp
    if not fits(config, grid.nodes, grid.tp):
        found = nearest(grid.nodes, _legal(config, ranks, fits))
        remedy = "" if found is None else f"; nearest is {found} nodes of {ranks // found} ranks"
        raise InvalidValue(
            "nodes", grid.nodes, f"{_reason(config, grid.strategy, ranks)}{remedy}"
        )  # fmt: skip


def place(config: ModelConfig, grid: Grid) -> Placement:
    """Every rank holds its slice of every layer; every node owns a part of every request."""
    whole = (Block(0, config.layers, embedding=True, head=True),)
    nodes = tuple(range(grid.nodes))
    return Placement((whole,) * grid.nodes, ((0,) * config.layers,), (nodes,))


def _legal(config: ModelConfig, ranks: int, fits: Fits) -> list[int]:
    return [k for k in range(1, ranks + 1) if ranks % k == 0 and fits(config, k, ranks // k)]


def _reason(config: ModelConfig, strategy: Strategy, ranks: int) -> str:
    return (
        f"{strategy} cuts {ranks} ranks into sequence shards whose ranks divide "
        f"{config.kv_heads} KV heads; all ranks must divide {config.intermediate_size} MLP columns "
        f"and {config.q_width} attention columns"
    )
