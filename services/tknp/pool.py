"""What every process of a pool derives from the pool file and the checkpoint, alike. No torch.

Two processes whose `compatibility` differs must not work together: they would cut the model or
number the pages differently.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tknp.config import PoolConfig
from tknp.errors import InvalidValue
from tknp.kv.size import page_bytes
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.rank import Rank
from tknp.layout.strategy import Strategy
from tknp.model.checkpoint import Checkpoint, open_checkpoint
from tknp.model.shard import check_tp
from tknp.transfer.compatibility import build
from tknp.v1.common_pb2 import Compatibility


@dataclass(frozen=True)
class Pool:
    """A pool file and the checkpoint that it names."""

    config: PoolConfig
    checkpoint: Checkpoint

    @cached_property
    def layout(self) -> Layout:
        """Who holds and owns what. Equal memories are assumed where none are declared."""
        specs = [NodeSpec.of(node.role, node.memory_bytes or 0) for node in self.config.nodes]
        config = self.config
        return make_layout(
            self.checkpoint.config, config.dtype, config.tp, specs,
            strategy=Strategy(config.strategy), copies=config.copies,
            microbatches=config.microbatches, width=config.width, interleave=config.interleave,
            overlap=config.overlap, domain_ranks=config.domain_ranks, inside=config.inside,
        )  # fmt: skip

    @property
    def page_size(self) -> int:
        return self.config.tokens_per_page

    @property
    def served_name(self) -> str:
        """What clients call the model."""
        name = self.config.served_model_name
        return name or Path(self.config.model).name.removesuffix(".gguf")

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens."""
        return self.config.max_model_len or self.checkpoint.config.max_position

    def weight_bytes(self, node: int) -> int:
        """Weights on TP rank 0 of decode node `node`: of all its blocks."""
        return self.layout.weight_bytes(Rank(node, 0))

    def page_bytes(self, node: int) -> int:
        """One page on one rank of `node`, over the layers whose KV it keeps."""
        layers = len(self.layout.kv_layers(Rank(node, 0)))
        return page_bytes(
            self.checkpoint.config, self.config.dtype, self.config.tp, self.page_size, layers
        )

    def pages(self, node: int, measured_bytes: int) -> int:
        """Pages on each rank of `node`, the dummy page among them; 0 where it owns nothing.

        The budget is the declared memory minus weights, else the declared KV memory, else
        `measured_bytes`. Raises InvalidValue naming the setting when it holds no page.
        """
        page = self.page_bytes(node)
        if not page:
            return 0
        memory = self.config.nodes[node].memory_bytes
        field, budget = "kv_memory_bytes", self.config.kv_memory_bytes or measured_bytes
        if memory is not None:
            field, budget = f"nodes[{node}].memory_bytes", memory - self.weight_bytes(node)
        if budget < 2 * page:
            given = memory if memory is not None else budget
            raise InvalidValue(
                field, given,
                f"leaves {budget} bytes for KV; two pages of {self.page_size} tokens need "
                f"{2 * page}",
            )  # fmt: skip
        return budget // page

    @cached_property
    def compatibility(self) -> Compatibility:
        """What decode nodes and the coordinator must agree on; prefill leaves `layout` empty."""
        return build(
            self.checkpoint.config,
            model=self.checkpoint.fingerprint,
            dtype=self.config.dtype,
            page_size=self.page_size,
            layout=self.layout.digest,
        )


def open_pool(config: PoolConfig) -> Pool:
    """Open the checkpoint that `config` names, and check everything that can be without reading it.

    Raises CheckpointError or InvalidValue, before any process serves.
    """
    checkpoint = open_checkpoint(config.model)
    checkpoint.validate()
    pool = Pool(config, checkpoint)
    longest = checkpoint.config.max_position
    if pool.max_model_len > longest:
        raise InvalidValue("max_model_len", pool.max_model_len, f"the checkpoint ends at {longest}")
    for i, replica in enumerate(config.prefill):
        check_tp(f"prefill[{i}].addresses", checkpoint.config, len(replica.addresses))
    for node in range(pool.layout.nodes):
        pool.pages(node, measured_bytes=2**62)
    return pool
