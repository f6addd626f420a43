"""Which part of the weights one rank holds. Pure arithmetic over ModelConfig.

A shard is a range of layers and, in each, TP slice `tp_rank` of `tp`:

    q heads      contiguous, q_heads / tp each
    kv heads     contiguous, kv_heads / tp each; one head shared by tp / kv_heads ranks beyond that
    MLP columns  contiguous, intermediate_size / tp each
    vocabulary   contiguous, ceil(vocab_size / tp) each, the last slice possibly shorter
"""

from __future__ import annotations

from dataclasses import dataclass

from tknp.errors import InvalidValue
from tknp.model.config import ModelConfig


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
    """

    config: ModelConfig
    layer_start: int
    layer_stop: int
    embedding: bool
    head: bool
    tp: int = 1
    tp_rank: int = 0

    @property
    def layers(self) -> range:
        return range(self.layer_start, self.layer_stop)

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
        n = self.config.intermediate_size // self.tp
        return range(self.tp_rank * n, (self.tp_rank + 1) * n)

    @property
    def vocab(self) -> range:
        n = -(-self.config.vocab_size // self.tp)
        start = min(self.tp_rank * n, self.config.vocab_size)
        return range(start, min(start + n, self.config.vocab_size))

    @property
    def q_width(self) -> int:
        return len(self.q_heads) * self.config.head_dim

    @property
    def kv_width(self) -> int:
        return len(self.kv_heads) * self.config.head_dim

    @property
    def qkv_width(self) -> int:
        """Elements of one projected row [q | k | v]: (Hq + 2 Hkv) dh / T, equation (1)."""
        return self.q_width + 2 * self.kv_width


def layer_parameters(config: ModelConfig, tp: int = 1) -> int:
    """Parameters of one decoder layer on one of `tp` ranks."""
    s = Shard(config, 0, 1, False, False, tp)
    d = config.hidden_size
    mlp = 3 * d * len(s.mlp_columns)
    return d * s.qkv_width + s.q_width * d + mlp + 2 * d


def embedding_parameters(config: ModelConfig, tp: int = 1) -> int:
    """Parameters of the embedding (or of an untied LM head) on rank 0 of `tp` ranks."""
    return len(Shard(config, 0, 0, True, False, tp).vocab) * config.hidden_size
