"""Which part of the weights one rank holds. Pure arithmetic over ModelConfig.

A shard is a range of layers and, in each, TP slice `tp_rank` of `tp`, by which attention is cut:

    q heads      contiguous, q_heads / tp each
    kv heads     contiguous, kv_heads / tp each; one head shared by tp / kv_heads ranks beyond that

and slice `dense_rank` of `dense_tp`, by which everything after attention is cut. Mostly that is the
same slice. Where dense work is spread over all N nodes (DCP, Helix), `dense_tp` is N tp and
`dense_rank` counts ranks node by node:

    MLP columns  contiguous, intermediate_size / dense_tp each
    vocabulary   contiguous, ceil(vocab_size / dense_tp) each, the last slice possibly shorter
    output       the attention row of TP slice t, Hq dh / tp columns, is shared by the `parts` ranks
                 of equal t: contiguous columns, which may cut heads

           rank (0, t)     rank (1, t)          q heads of t = attention row of t
         |  columns 0  |   columns 1   |        the part of it that output(layer) reads
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tknp.errors import InvalidValue
from tknp.model.config import ModelConfig

Projected = Literal["attention", "dense"]


def legal_tp(config: ModelConfig) -> tuple[int, ...]:
    """TP degrees that `config` can be cut into, ascending."""
    return tuple(t for t in range(1, config.q_heads + 1) if _divides(config, t))


def _divides(config: ModelConfig, tp: int) -> bool:
    heads = config.q_heads % tp == 0
    kv = config.kv_heads % tp == 0 or tp % config.kv_heads == 0
    return heads and kv and config.intermediate_size % tp == 0


def check_tp(field: str, config: ModelConfig, tp: int) -> int:
    """Return `tp`, or raise InvalidValue naming the nearest legal degree."""
    legal = legal_tp(config)
    if tp not in legal:
        nearest = min(legal, key=lambda t: (abs(t - tp), t))
        raise InvalidValue(
            field, tp,
            f"must divide {config.q_heads} query heads, {config.kv_heads} KV heads (or be a "
            f"multiple of them) and {config.intermediate_size} MLP columns; nearest is {nearest}",
        )  # fmt: skip
    return tp


@dataclass(frozen=True)
class Shard:
    """Layers [layer_start, layer_stop) of `config`, slice `tp_rank` of `tp`.

    `embedding`: holds its vocabulary slice of the embedding. `head`: holds final norm and LM head
    (the embedding slice itself where the embeddings are tied).

    `dense_tp` 0, the default, means `tp` and `tp_rank`. `projected`: what one rank projects of the
    row [q | k | v] of its heads. "attention": the whole row, on all ranks of equal t alike (Helix
    section 2.1.1). "dense": columns, contiguous in q, in k and in v, to be gathered (DCP).
    """

    config: ModelConfig
    layer_start: int
    layer_stop: int
    embedding: bool
    head: bool
    tp: int = 1
    tp_rank: int = 0
    dense_tp: int = 0
    dense_rank: int = 0
    projected: Projected = "attention"

    def __post_init__(self) -> None:
        if self.dense_tp == 0:
            object.__setattr__(self, "dense_tp", self.tp)
            object.__setattr__(self, "dense_rank", self.tp_rank)
        if self.dense_tp % self.tp:
            raise InvalidValue("dense_tp", self.dense_tp, f"must be a multiple of tp={self.tp}")
        if not 0 <= self.dense_rank < self.dense_tp:
            raise InvalidValue("dense_rank", self.dense_rank, f"must be below {self.dense_tp}")

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_stop)

    @property
    def parts(self) -> int:
        """Ranks that share the dense work of one TP slice: 1 unless it is spread over nodes."""
        return self.dense_tp // self.tp

    @property
    def q_heads(self) -> range:
        """Global indices of this rank's query heads."""
        n = self.config.q_heads // self.tp
        return range(self.tp_rank * n, (self.tp_rank + 1) * n)

    @property
    def kv_heads(self) -> range:
        """Global indices of this rank's KV heads; several ranks share one beyond kv_heads."""
        if self.tp <= self.config.kv_heads:
            n = self.config.kv_heads // self.tp
            return range(self.tp_rank * n, (self.tp_rank + 1) * n)
        head = self.tp_rank * self.config.kv_heads // self.tp
        return range(head, head + 1)

    @property
    def mlp_columns(self) -> range:
        return _slice(self.config.intermediate_size, self.dense_tp, self.dense_rank)

    @property
    def vocab(self) -> range:
        return _slice(self.config.vocab_size, self.dense_tp, self.dense_rank)

    @property
    def q_width(self) -> int:
        return len(self.q_heads) * self.config.head_dim

    @property
    def kv_width(self) -> int:
        return len(self.kv_heads) * self.config.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of one row [q | k | v] that attention reads: (Hq + 2 Hkv) dh / T, eq. (1)."""
        return self.q_width + 2 * self.kv_width

    @property
    def output_columns(self) -> range:
        """Columns of this rank's attention row, of `q_width`, that `Dense.output` reads."""
        return _slice(self.q_width, self.parts, self.dense_rank // self.tp)

    @property
    def q_columns(self) -> range:
        """Columns of q, of `q_width`, that `Dense.project` computes."""
        return self._projected(self.q_width)

    @property
    def kv_columns(self) -> range:
        """Columns of k and as many of v, of `kv_width`, that `Dense.project` computes."""
        return self._projected(self.kv_width)

    @property
    def projected_width(self) -> int:
        """Elements of one row [q | k | v] that `Dense.project` returns."""
        return len(self.q_columns) + 2 * len(self.kv_columns)

    def _projected(self, width: int) -> range:
        if self.projected == "attention":
            return range(width)
        return _slice(width, self.parts, self.dense_rank // self.tp)


def _slice(width: int, slices: int, index: int) -> range:
    """Slice `index` of `width` columns: equal ones, except that the last may be shorter."""
    n = -(-width // slices)
    start = min(index * n, width)
    return range(start, min(start + n, width))


def attention_parameters(shard: Shard) -> int:
    """Parameters of one layer's projections to and from attention on one rank."""
    return (shard.projected_width + len(shard.output_columns)) * shard.config.hidden_size


def mlp_parameters(shard: Shard) -> int:
    """Parameters of one layer's MLP on one rank."""
    matrices = 3 if shard.config.gated else 2
    return matrices * len(shard.mlp_columns) * shard.config.hidden_size


def norm_parameters(config: ModelConfig) -> int:
    """Parameters of one norm, of which a layer has two."""
    return config.hidden_size * (2 if config.biased_norms else 1)


def layer_parameters(config: ModelConfig, tp: int = 1) -> int:
    """Parameters of one decoder layer on one of `tp` ranks."""
    shard = Shard(config, 0, 1, False, False, tp)
    return attention_parameters(shard) + mlp_parameters(shard) + 2 * norm_parameters(config)


def embedding_parameters(config: ModelConfig, tp: int = 1) -> int:
    """Parameters of the embedding (or of an untied LM head) on rank 0 of `tp` ranks."""
    return len(Shard(config, 0, 0, True, False, tp).vocab) * config.hidden_size
