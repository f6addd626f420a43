"""A layout: who holds which weights and who may own requests. Plain data, hashable.

Everything that ranks must agree on in a step follows from a layout and the number of rows of each
owner, see `tknp.layout.tknp`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from tknp.errors import InvalidValue
from tknp.layout.blocks import Block, cut
from tknp.layout.rank import Rank
from tknp.model.config import ITEM_BYTES, DType, ModelConfig
from tknp.model.footprint import footprint
from tknp.model.shard import Shard, check_tp


@dataclass(frozen=True)
class NodeSpec:
    """What a node is asked to be.

    `memory_bytes`: weights plus KV on each of its ranks. `root`: takes a layer block.
    `owner`: takes requests. A node is at least one of the two.
    """

    memory_bytes: int
    root: bool = True
    owner: bool = True


@dataclass(frozen=True)
class Layout:
    """Single-copy TKNP over `len(blocks)` nodes of `tp` ranks.

    `blocks[n]`: what node n roots, empty for attention-only nodes. `owners`: nodes that hold KV.
    """

    config: ModelConfig
    dtype: DType
    tp: int
    blocks: tuple[Block, ...]
    owners: tuple[int, ...]
    strategy: str = "tknp"

    @property
    def nodes(self) -> int:
        return len(self.blocks)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @cached_property
    def roots(self) -> tuple[int, ...]:
        """Root node of each layer."""
        by_layer = {layer: n for n, b in enumerate(self.blocks) for layer in b.layers}
        return tuple(by_layer[layer] for layer in range(self.config.layers))

    @cached_property
    def first_root(self) -> int:
        """Node that embeds."""
        return next(n for n, b in enumerate(self.blocks) if b.embedding)

    @cached_property
    def sampler(self) -> int:
        """Node that holds the head and samples."""
        return next(n for n, b in enumerate(self.blocks) if b.head)

    def shard(self, rank: Rank) -> Shard:
        """Weights that `rank` holds."""
        block = self.blocks[rank.node]
        return Shard(
            self.config, block.start, block.stop, block.embedding, block.head, self.tp, rank.t
        )

    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(n, t) for n in range(self.nodes) for t in range(self.tp))

    @cached_property
    def digest(self) -> str:
        """Equal on two processes if and only if their layouts are."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_layout(config: ModelConfig, dtype: DType, tp: int, nodes: Sequence[NodeSpec]) -> Layout:
    """Cut the layers of `config` over the root nodes of `nodes`.

    Raises InvalidValue naming the nearest legal choice when the model can't be cut so.
    """
    check_tp("tp", config, tp)
    roots = [n for n, spec in enumerate(nodes) if spec.root]
    owners = tuple(n for n, spec in enumerate(nodes) if spec.owner)
    if not roots:
        raise InvalidValue("nodes", len(nodes), "at least one node must root layers")
    if not owners:
        raise InvalidValue("nodes", len(nodes), "at least one node must own requests")
    memories = [nodes[n].memory_bytes for n in roots]
    cuts = cut(footprint(config, dtype, tp), memories, tied=config.tied_embeddings)
    blocks = [Block(0, 0)] * len(nodes)
    for n, block in zip(roots, cuts, strict=True):
        blocks[n] = block
    return Layout(config, dtype, tp, tuple(blocks), owners)
