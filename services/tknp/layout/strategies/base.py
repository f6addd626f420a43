"""What a strategy must say: its logical grid, what it refuses, and who holds and owns what.

    asked: nodes x tp as the machines stand, and options  --grid-->  Grid: logical nodes and ranks
    Grid, memory and role of each logical node            --place--> Placement
    Placement and model                                   ==         Layout (tknp.layout.layout)

Logical nodes are what programs speak of. They differ from machines where a strategy's groups do:
tensor parallelism over all ranks is one logical node, and K sequence shards are K logical nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from tknp.errors import InvalidValue
from tknp.layout.blocks import Block
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import DType, ModelConfig


@dataclass(frozen=True)
class NodeSpec:
    """What a logical node is asked to be.

    `memory_bytes`: weights plus KV on each of its ranks. `root`: takes layer blocks.
    `owner`: takes requests. A node is at least one of the two.
    """

    memory_bytes: int
    root: bool = True
    owner: bool = True

    @classmethod
    def of(cls, role: str, memory_bytes: int) -> NodeSpec:
        """A node of a `role` of the pool file: decode-node, decode-root or attention-owner."""
        return cls(memory_bytes, role != "attention-owner", role != "decode-root")


@dataclass(frozen=True)
class Asked:
    """What a user asks for: `nodes` machines of `tp` ranks. None where the strategy may choose.

    `kvp`: sequence shards. `copies`: of the weights. `microbatches`: streams. `width`: most owners
    of one request. `overlap`: groups of rows whose exchange overlaps attention (HOP-B).
    `inside`: sequence shards of one head group stand in one machine, not across machines.
    `roles`: of each machine, as the pool file names them; empty: all root and own.
    """

    nodes: int
    tp: int
    kvp: int | None = None
    copies: int | None = None
    microbatches: int | None = None
    width: int | None = None
    overlap: int | None = None
    inside: bool | None = None
    roles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """`nodes` logical nodes of `tp` ranks, and the options of `strategy` with defaults filled in.

    `domain_ranks` ranks share NVLink: consecutive ones in node-major order, or, `inside`, in
    t-major order. `roles`: of each node; empty: all root and own.
    """

    strategy: Strategy
    nodes: int
    tp: int
    copies: int = 1
    microbatches: int = 1
    width: int = 1
    overlap: int = 1
    domain_ranks: int = 0
    inside: bool = False
    roles: tuple[str, ...] = ()

    def specs(self, memory_bytes: int) -> list[NodeSpec]:
        """Nodes of `memory_bytes` a rank."""
        roles = self.roles or ("decode-node",) * self.nodes
        return [NodeSpec.of(role, memory_bytes) for role in roles]


@dataclass(frozen=True)
class Placement:
    """`held`, `routes` and `owners` of a Layout."""

    held: tuple[tuple[Block, ...], ...]
    routes: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[int, ...], ...]


class Rules(Protocol):
    """One strategy.

    `options`: fields of Asked that it reads beside nodes and tp. `divides`: what several owners of
    one request divide. `spread`: dense work of every layer runs on all ranks.
    """

    options: frozenset[str]
    divides: Divides
    spread: bool

    def grid(self, config: ModelConfig, asked: Asked) -> Grid:
        """The logical grid; raises InvalidValue with reason and nearest legal choice."""

    def check(self, config: ModelConfig, grid: Grid, specs: list[NodeSpec]) -> None:
        """Refuse what can't be placed: InvalidValue with reason and nearest legal choice."""

    def place(
        self, config: ModelConfig, dtype: DType, grid: Grid, specs: list[NodeSpec]
    ) -> Placement:
        """Who holds and owns what, on a grid that `check` passed."""


def nearest(value: int, legal: Iterable[int]) -> int | None:
    """The legal number closest to `value`, the lower of two; None where there is none."""
    return min(legal, key=lambda n: (abs(n - value), n), default=None)


def nearest_nodes(nodes: int, legal: Callable[[int], bool]) -> str:
    """Remedy that names the nearest legal number of nodes."""
    found = nearest(nodes, filter(legal, range(1, 2 * nodes + 1)))
    return "no number of nodes is legal" if found is None else f"nearest is {found} nodes"


def roots_of(specs: list[NodeSpec]) -> list[int]:
    """Nodes that take blocks, in order; raises InvalidValue without any, or without an owner."""
    roots = [n for n, spec in enumerate(specs) if spec.root]
    if not roots:
        raise InvalidValue("nodes", len(specs), "at least one node must root layers")
    if not any(spec.owner for spec in specs):
        raise InvalidValue("nodes", len(specs), "at least one node must own requests")
    return roots


def check_roots(config: ModelConfig, specs: list[NodeSpec]) -> list[int]:
    """`roots_of`, refusing more roots than layers."""
    roots = roots_of(specs)
    if len(roots) > config.layers:
        raise InvalidValue(
            "nodes", len(roots),
            f"give 1 to {config.layers} root nodes, one layer each at least",
        )  # fmt: skip
    return roots


def check_whole(strategy: Strategy, specs: list[NodeSpec]) -> None:
    """Refuse root-only and attention-only nodes where every node must be both."""
    for n, spec in enumerate(specs):
        if not (spec.root and spec.owner):
            raise InvalidValue(
                f"nodes[{n}].role", "decode-root" if spec.root else "attention-owner",
                f"{strategy} needs nodes that root and own; only tknp separates the two",
            )  # fmt: skip
