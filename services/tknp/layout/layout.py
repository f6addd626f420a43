"""A layout: who holds which weights and who may own requests. Plain data, hashable.

    model, logical grid, memory and role of each node  --make_layout-->  Layout
    Layout, stream, groups of rows, rank               --derive------->  Program

Everything that ranks must agree on in a step follows from a layout and the owners of the step's
rows, see `tknp.layout.rows` and `tknp.layout.derive`. A stream is a microbatch, or a replica of
data parallelism; each has its own steps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from tknp.errors import InvalidValue
from tknp.layout.blocks import Block
from tknp.layout.rank import Rank
from tknp.layout.strategies import RULES, Grid, NodeSpec, check_options
from tknp.layout.strategy import Divides, Strategy
from tknp.model.config import ITEM_BYTES, DType, ModelConfig
from tknp.model.footprint import Part, footprint
from tknp.model.shard import Projected, Shard

__all__ = ["Layout", "NodeSpec", "lay_out", "make_layout"]


@dataclass(frozen=True)
class Layout:
    """`strategy` over `len(held)` logical nodes of `tp` ranks.

    `held[n]`: blocks that node n holds: none (attention only), one, or two (copies 2); a slice of
    every layer where dense work is spread. `routes[s][layer]`: root of `layer` for stream s (node 0
    throughout where dense work is spread). `owners[s]`: nodes that may keep KV of requests of
    stream s. `width`: most owners of one request. `interleave`: generated tokens that an owner
    appends before the next one's turn. `overlap`: groups of rows whose exchange runs under the next
    group's attention. `domain_ranks`: ranks that share NVLink, `tp` by default: consecutive ones in
    node-major order or, `inside`, in t-major order.
    """

    config: ModelConfig
    dtype: DType
    tp: int
    strategy: Strategy
    held: tuple[tuple[Block, ...], ...]
    routes: tuple[tuple[int, ...], ...]
    owners: tuple[tuple[int, ...], ...]
    width: int = 1
    interleave: int = 16
    overlap: int = 1
    domain_ranks: int = 0
    inside: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "interleave", "overlap"):
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "must be at least 1")
        if self.domain_ranks == 0:
            object.__setattr__(self, "domain_ranks", self.tp)

    @property
    def nodes(self) -> int:
        return len(self.held)

    @property
    def streams(self) -> int:
        return len(self.routes)

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def spread(self) -> bool:
        """Whether every layer's dense work runs on all ranks (dcp, helix)."""
        return RULES[self.strategy].spread

    @property
    def divides(self) -> Divides:
        """What several owners of one request divide."""
        return RULES[self.strategy].divides

    @property
    def dense_tp(self) -> int:
        """Ranks over which one layer's dense work is divided."""
        return self.tp * self.nodes if self.spread else self.tp

    def roots(self, stream: int) -> tuple[int, ...]:
        """Root of each layer for `stream`."""
        return self.routes[stream]

    def first_root(self, stream: int) -> int:
        """Node that embeds; one of all where dense work is spread."""
        return self.routes[stream][0]

    def sampler(self, stream: int) -> int:
        """Node whose TP rank 0 samples: it holds the head."""
        return self.routes[stream][0 if self.config.tied_embeddings else -1]

    def embeds(self, stream: int, rank: Rank) -> bool:
        """Whether `rank` embeds, so that it needs the ids of every step."""
        return self.spread or rank.node == self.first_root(stream)

    def members(self, stream: int) -> tuple[int, ...]:
        """Nodes that take part in steps of `stream`."""
        return tuple(sorted({*self.routes[stream], *self.owners[stream]}))

    def heads(self, rank: Rank) -> Shard:
        """The heads that attention at `rank` works on: a shard without weights."""
        return Shard(
            self.config, 0, 0, False, False, self.tp, rank.t,
            self.dense_tp, self._dense_rank(rank), self._projected,
        )  # fmt: skip

    def shards(self, rank: Rank) -> tuple[Shard, ...]:
        """Weights that `rank` holds, one shard a block."""
        return tuple(
            Shard(
                self.config, block.start, block.stop, block.embedding, block.head, self.tp, rank.t,
                self.dense_tp, self._dense_rank(rank), self._projected,
            )
            for block in self.held[rank.node]
        )  # fmt: skip

    def kv_heads(self, rank: Rank) -> range:
        """KV heads of which `rank` keeps KV, in every layer of `kv_layers`."""
        return self.heads(rank).kv_heads

    def kv_layers(self, rank: Rank) -> range:
        """Layers of which `rank` keeps KV: none on a node that owns nothing."""
        if rank.node not in self.kv_nodes:
            return range(0)
        if self.divides == "layers":
            (block,) = self.held[rank.node]
            return block.layers
        return range(self.config.layers)

    def weight_bytes(
        self, rank: Rank, bytes_per_parameter: Mapping[Part, float] | None = None
    ) -> int:
        """Bytes of weights on `rank`'s node, a rank, TP rank 0 counted: no rank holds more."""
        weights = footprint(
            self.config, self.dtype, self.tp, bytes_per_parameter,
            dense_tp=self.dense_tp, projected=self._projected,
        )  # fmt: skip
        return sum(block.weight_bytes(weights) for block in self.held[rank.node])

    @cached_property
    def kv_nodes(self) -> tuple[int, ...]:
        """Nodes that keep KV of requests of any stream."""
        return tuple(sorted({node for owners in self.owners for node in owners}))

    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(n, t) for n in range(self.nodes) for t in range(self.tp))

    def domain(self, rank: Rank) -> int:
        """NVLink domain of `rank`; bytes between two domains are network traffic."""
        index = rank.t * self.nodes + rank.node if self.inside else rank.index(self.tp)
        return index // self.domain_ranks

    @cached_property
    def digest(self) -> str:
        """Equal on two processes if and only if their layouts are."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def _projected(self) -> Projected:
        return "dense" if self.strategy is Strategy.DCP else "attention"

    def _dense_rank(self, rank: Rank) -> int:
        return rank.index(self.tp) if self.spread else rank.t


def make_layout(
    config: ModelConfig,
    dtype: DType,
    tp: int,
    nodes: Sequence[NodeSpec],
    *,
    strategy: Strategy = Strategy.TKNP,
    copies: int = 1,
    microbatches: int | None = None,
    width: int | None = None,
    interleave: int = 16,
    overlap: int = 1,
    domain_ranks: int = 0,
    inside: bool = False,
) -> Layout:
    """Lay `config` over logical nodes of `tp` ranks, see `tknp.layout.strategies.grid`.

    `microbatches` defaults to the strategy's own number, `width` to all owners for tknp. Raises
    InvalidValue naming the nearest legal choice when the model can't be laid out so.
    """
    check_options(
        strategy, copies=copies, microbatches=microbatches, overlap=overlap, inside=inside
    )
    count = len(nodes)
    streams = {Strategy.TKNP: copies, Strategy.DP: count, Strategy.PP: count}.get(strategy, 1)
    if width is None:
        tokens = RULES[strategy].divides == "tokens" and strategy is not Strategy.DP
        width = max(1, sum(spec.owner for spec in nodes)) if tokens else 1
    chosen = Grid(
        strategy, count, tp, copies, streams if microbatches is None else microbatches, width,
        overlap, domain_ranks or tp, inside,
    )  # fmt: skip
    return lay_out(config, dtype, chosen, nodes, interleave=interleave)


def lay_out(
    config: ModelConfig,
    dtype: DType,
    grid: Grid,
    nodes: Sequence[NodeSpec],
    *,
    interleave: int = 16,
) -> Layout:
    """Lay `config` over `grid`, whose nodes are `nodes`. Raises InvalidValue as `make_layout`."""
    rules, specs = RULES[grid.strategy], list(nodes)
    rules.check(config, grid, specs)
    placement = rules.place(config, dtype, grid, specs)
    return Layout(
        config, dtype, grid.tp, grid.strategy,
        placement.held, placement.routes, placement.owners,
        grid.width, interleave, grid.overlap, grid.domain_ranks, grid.inside,
    )  # fmt: skip
