"""The pool of decode nodes: how many, of what, and how they divide a model."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tknp_operator.api.rules import Part, Rule
from tknp_operator.api.values import Count, Resources

# CEL for Decode.roots and Decode.owners: nodes that are not only the other.
_COUNT = "(self.roles.size() == 0 ? self.nodes : self.roles.filter(r, r != '{}').size())"
_ROOTS, _OWNERS = _COUNT.format("attention-owner"), _COUNT.format("decode-root")


class Decode(Part):
    nodes: Count
    """Decode nodes of the pool, N. Each is one pod."""
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = 1
    """T: GPUs of a node and ranks of it. One number for the whole pool."""
    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: no GPU is asked for, and nodes may share a host."""
    gpu_products: Annotated[list[Annotated[str, Field(max_length=63)]], Field(max_length=16)] = []
    """Allowed values of the label nvidia.com/gpu.product or parts of them, such as H100; all."""
    allow_mixed_products: bool = False
    """Whether one pool may have nodes of several products."""
    strategy: Literal["tknp", "dp", "tp", "pp", "dcp", "helix"] = "tknp"
    """How model and requests are divided: see docs/strategies.md."""
    copies: Literal[1, 2] = 1
    """Of the weights; 2: dual active roots."""
    microbatches: Count | None = None
    """Streams of steps (tknp, pp); unset: what the strategy takes."""
    width: Count | None = None
    """Most owners of one request; unset: as few as hold it, up to all."""
    roles: Annotated[
        list[Literal["decode-node", "decode-root", "attention-owner"]], Field(max_length=1024)
    ] = []
    """One a node; empty: decode-node for all."""
    kv_dtype: Literal["auto"] = "auto"
    """Of the KV cache; auto: the dtype of the model."""
    page_size: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Tokens in a KV page; unset: 64 on CPU, 256 on CUDA."""
    kv_memory: Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?[kMGT]i?B?$")] | None = None
    """KV cache of a rank; unset: what is free once weights are loaded."""
    max_batch: Annotated[int, Field(ge=1, le=65_536)] = 256
    """Rows of a step, of each stream."""
    spare_nodes: Annotated[int, Field(ge=0, le=64)] = 0
    """Nodes of the cluster to hold in reserve for a lost one."""
    resources: Resources = Resources()
    """Of each pod; GPUs are added."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(f"self.copies == 1 || {_ROOTS} % 2 == 0",
             lambda d: d.copies == 1 or d.roots % 2 == 0,
             "copies 2 pairs every root with the one half a turn away: make their number even"),
        Rule("self.copies == 1 || self.strategy == 'tknp'",
             lambda d: d.copies == 1 or d.strategy == "tknp",
             "copies 2 is dual active roots: set strategy tknp or copies 1"),
        Rule("!has(self.microbatches) || self.strategy in ['tknp', 'pp']",
             lambda d: d.microbatches is None or d.strategy in ("tknp", "pp"),
             "only tknp and pp have microbatches: leave it out"),
        Rule("!has(self.microbatches) || self.strategy != 'tknp' || self.copies == 2 "
             f"|| {_ROOTS} % self.microbatches == 0",
             lambda d: d.microbatches is None or d.strategy != "tknp" or d.copies == 2
             or d.roots % d.microbatches == 0,
             "microbatches must divide the nodes that root layers, so that they are evenly apart"),
        Rule("self.copies == 1 || !has(self.microbatches) || self.microbatches == 2",
             lambda d: d.copies == 1 or d.microbatches in (None, 2),
             "copies 2 has two microbatches: leave microbatches out"),
        Rule("self.strategy != 'tp' || self.nodes == 1",
             lambda d: d.strategy != "tp" or d.nodes == 1,
             "tp runs in one node: set nodes 1 and all its GPUs as tensorParallel"),
        Rule(f"!has(self.width) || (self.strategy == 'tknp' && self.width <= {_OWNERS})",
             lambda d: d.width is None or (d.strategy == "tknp" and d.width <= d.owners),
             "width is for tknp and at most the number of nodes that own requests"),
        Rule("self.roles.size() == 0 || (self.strategy == 'tknp' "
             "&& self.roles.size() == self.nodes)",
             lambda d: not d.roles or (d.strategy == "tknp" and len(d.roles) == d.nodes),
             "roles is for tknp and has one entry a node"),
        Rule("self.roles.size() == 0 || (self.roles.exists(r, r != 'attention-owner') "
             "&& self.roles.exists(r, r != 'decode-root'))",
             lambda d: not d.roles or (any(r != "attention-owner" for r in d.roles)
                                       and any(r != "decode-root" for r in d.roles)),
             "roles must leave a node that roots layers and a node that owns requests"),
        Rule("self.device == 'cuda' || self.gpuProducts.size() == 0",
             lambda d: d.device == "cuda" or not d.gpu_products,
             "gpuProducts needs device cuda"),
    )  # fmt: skip

    @property
    def roots(self) -> int:
        """Nodes that root layers."""
        return sum(role != "attention-owner" for role in self.roles) if self.roles else self.nodes

    @property
    def owners(self) -> int:
        """Nodes that own requests."""
        return sum(role != "decode-root" for role in self.roles) if self.roles else self.nodes

    def role(self, node: int) -> str:
        """What node `node` runs; decode-node: both."""
        return self.roles[node] if self.roles else "decode-node"
