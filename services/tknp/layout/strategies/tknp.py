"""Token parallelism: every layer has one root, every request its owners (Decode Token Parallelism).

    copies 1   block b on node b; any number of microbatches that divides the roots, out of phase
    copies 2   block b on nodes b and (b + R/2) mod R; two microbatches, the second rooted there

Nodes may be root only or attention only: operator disaggregation. A request has one owner, up to
`width` where none can hold it alone.
"""

from __future__ import annotations

from tknp.errors import InvalidValue
from tknp.layout.blocks import Block, cut, cut_pairs, cut_time
from tknp.layout.strategies.base import (
    Asked,
    Grid,
    NodeSpec,
    Placement,
    check_roots,
    nearest,
)
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import DType, ModelConfig
from tknp.model.footprint import footprint
from tknp.model.shard import check_tp


class Tknp:
    """Single copy, offset microbatches, and dual active roots (section 4.5)."""

    options = frozenset({"copies", "microbatches", "width", "roles"})
    divides: Divides = "tokens"
    spread = False

    def grid(self, config: ModelConfig, asked: Asked) -> Grid:
        copies = asked.copies or 1
        microbatches = asked.microbatches or copies
        owners = sum(NodeSpec.of(role, 0).owner for role in asked.roles) or asked.nodes
        return Grid(
            Strategy.TKNP, asked.nodes, asked.tp, copies, microbatches, asked.width or owners, 1,
            asked.tp, roles=asked.roles,
        )  # fmt: skip

    def check(self, config: ModelConfig, grid: Grid, specs: list[NodeSpec]) -> None:
        check_tp("tp", config, grid.tp)
        roots = len(check_roots(config, specs))
        owners = sum(spec.owner for spec in specs)
        if not 1 <= grid.width <= owners:
            raise InvalidValue(
                "width", grid.width,
                f"a request has 1 to {owners} owners here, one a node; nearest is "
                f"{nearest(grid.width, range(1, owners + 1))}",
            )  # fmt: skip
        if grid.copies not in (1, 2):
            raise InvalidValue("copies", grid.copies, "keep 1 copy of the weights, or 2")
        if grid.copies == 2 and roots % 2:
            fewer = f"{roots - 1} or " if roots > 1 else ""
            raise InvalidValue(
                "copies", 2,
                f"block b has its second root R/2 nodes further, so that {roots} root nodes, an "
                f"odd number, have none; use {fewer}{roots + 1} of them, or 1 copy",
            )  # fmt: skip
        if grid.copies == 2 and grid.microbatches != 2:
            raise InvalidValue(
                "microbatches", grid.microbatches,
                "two copies run two microbatches, one on each root of a block; nearest is 2",
            )  # fmt: skip
        if grid.copies == 1 and (grid.microbatches < 1 or roots % grid.microbatches):
            divisors = [m for m in range(1, roots + 1) if roots % m == 0]
            raise InvalidValue(
                "microbatches", grid.microbatches,
                f"microbatches run R/m blocks apart, so m must divide {roots} root nodes; "
                f"nearest is {nearest(grid.microbatches, divisors)}",
            )  # fmt: skip

    def place(
        self, config: ModelConfig, dtype: DType, grid: Grid, specs: list[NodeSpec]
    ) -> Placement:
        roots = [n for n, spec in enumerate(specs) if spec.root]
        owners = tuple(n for n, spec in enumerate(specs) if spec.owner)
        weights = footprint(config, dtype, grid.tp)
        memories = [specs[n].memory_bytes for n in roots]
        tied = config.tied_embeddings
        if grid.copies == 2:
            blocks = cut_pairs(weights, memories, tied=tied)
        elif grid.microbatches > 1:
            blocks = cut_time(weights, len(roots), tied=tied)
        else:
            blocks = cut(weights, memories, tied=tied)
        shift = len(roots) // 2
        held: list[tuple[Block, ...]] = [()] * len(specs)
        for b, n in enumerate(roots):
            held[n] = (blocks[b],)
            if grid.copies == 2:
                held[n] += (blocks[(b + shift) % len(roots)],)
        routes = []
        for stream in range(grid.microbatches):
            moved = shift * stream if grid.copies == 2 else 0
            routes.append(
                tuple(
                    roots[(b + moved) % len(roots)]
                    for b, block in enumerate(blocks)
                    for _ in block.layers
                )
            )
        return Placement(tuple(held), tuple(routes), (owners,) * grid.microbatches)
