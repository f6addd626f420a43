"""What a strategy leaves for KV, and what that is against data parallelism.

A rank's budget is its memory minus the weights of its shards. Usable of it is what no other rank of
its node keeps too: beyond Hkv ranks several keep the same head. A token takes, on each rank that
keeps it, keys and values of that rank's layers and heads. Where owners divide tokens their
capacities add up; where every owner keeps every token, but only some layers or heads of it, the
smallest counts: whole layers can't use up equal budgets.

Source: Decode Token Parallelism, section 3.2 and Figure 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from tknp.errors import InvalidValue
from tknp.layout.layout import Layout
from tknp.layout.rank import Rank
from tknp.layout.strategy import Strategy
from tknp.planner.hardware import GIB, Hardware
from tknp.planner.models import Model


@dataclass(frozen=True)
class NodeCapacity:
    """Of the fullest rank of a node; `tokens` 0 where the node keeps no KV."""

    node: int
    weight_bytes: int
    budget_bytes: int
    tokens: int


@dataclass(frozen=True)
class Capacity:
    """Of a pool. `kv_bytes`: usable budgets of all ranks. `tokens`: that it keeps."""

    nodes: tuple[NodeCapacity, ...]
    tokens: int
    kv_bytes: int


def token_bytes(layout: Layout, rank: Rank) -> int:
    """KV of one token on `rank`."""
    heads, layers = len(layout.kv_heads(rank)), len(layout.kv_layers(rank))
    return 2 * layers * heads * layout.config.head_dim * layout.item_bytes


def memory_bytes(layout: Layout, hardware: Hardware, *, fitted: bool = True) -> int:
    """Weights plus KV that fit a rank of `layout`; `fitted` tells pools and replicas apart."""
    alone = layout.strategy is Strategy.DP or layout.nodes * layout.tp <= layout.domain_ranks
    return hardware.replica_bytes if alone or not fitted else hardware.pool_bytes


def capacity(
    model: Model, layout: Layout, hardware: Hardware, *, fitted: bool = True
) -> Capacity:  # fmt: skip
    """Capacity of `layout`. Raises InvalidValue where a node's weights don't fit its memory."""
    memory = memory_bytes(layout, hardware, fitted=fitted)
    owners = {node for nodes in layout.owners for node in nodes}
    nodes = []
    for node in range(layout.nodes):
        rank = Rank(node, 0)
        weights = layout.weight_bytes(rank, model.bytes_per_parameter)
        if weights > memory:
            raise InvalidValue(
                "nodes", layout.nodes,
                f"{model.name} takes {weights / GIB:.1f} GiB a rank of node {node}, a "
                f"{hardware.name} rank has {memory / GIB:.1f}; take more nodes, a higher tp or "
                "another strategy",
            )  # fmt: skip
        token = token_bytes(layout, rank) if node in owners else 0
        tokens = (memory - weights) // token if token else 0
        nodes.append(NodeCapacity(node, weights, memory - weights, tokens))
    held = [node.tokens for node in nodes if node.node in owners]
    tokens = sum(held) if layout.divides == "tokens" else min(held)
    copies = max(layout.tp // model.config.kv_heads, 1)
    usable = sum(node.budget_bytes for node in nodes if node.node in owners)
    return Capacity(tuple(nodes), tokens, usable * layout.tp // copies)
