"""Shapes of a decoder model. Pure: no torch, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tknp.errors import InvalidValue

Family = Literal["llama", "nemotron"]
DType = Literal["float32", "bfloat16", "float16"]
ITEM_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
RESIDUAL_BYTES = 4  # the residual stream is float32 in every dtype


def check_dtype(field: str, value: str) -> DType:
    """Return `value` as a DType or raise InvalidValue naming `field`."""
    for known in ITEM_BYTES:
        if value == known:
            return known
    raise InvalidValue(field, value, f"choose one of {', '.join(ITEM_BYTES)}")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 frequency scaling (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (`rope_type: linear`): every frequency divided by `factor`."""

    factor: float

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise InvalidValue("factor", self.factor, "must be above 0")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of two families, both with RoPE and GQA and without biases of projections.

    llama     RMSNorm, SwiGLU
    nemotron  Nemotron-4: LayerNorm whose scale is stored less one, with a bias; squared ReLU
              without a gate; usually only part of each head rotated

    `max_position` is the longest context in tokens that the checkpoint declares. `rope_factors`,
    one a rotary pair, divide the RoPE frequencies: GGUF's form of any frequency scaling.
    `partial_rotary_factor`: share of each head, from its first element on, that is rotated.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | LinearScaling | None = None
    rope_factors: tuple[float, ...] | None = None
    tied_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    family: Family = "llama"
    partial_rotary_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "layers",
            "q_heads", "kv_heads", "head_dim", "max_position",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise InvalidValue(name, getattr(self, name), "must be at least 1")
        if self.q_heads % self.kv_heads:
            raise InvalidValue(
                "q_heads", self.q_heads, f"must be a multiple of kv_heads={self.kv_heads}"
            )
        if self.family not in get_args(Family):
            raise InvalidValue("family", self.family, f"choose one of {get_args(Family)}")
        if self.head_dim % 2:
            raise InvalidValue("head_dim", self.head_dim, "must be even for rotary embedding")
        if not 0 < self.partial_rotary_factor <= 1 or self.rotary_dim % 2 or not self.rotary_dim:
            remedy = f"must rotate an even part of head_dim={self.head_dim}, or 1.0 for all of it"
            raise InvalidValue("partial_rotary_factor", self.partial_rotary_factor, remedy)
        factors = self.rope_factors
        if factors is not None and (len(factors) != self.rotary_dim // 2 or min(factors) <= 0):
            raise InvalidValue(
                "rope_factors", factors, f"must be {self.rotary_dim // 2} numbers above 0"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def rotary_dim(self) -> int:
        """Elements of each head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate: three matrices a layer instead of two."""
        return self.family == "llama"

    @property
    def biased_norms(self) -> bool:
        """Whether norms are LayerNorms with a bias and a scale stored less one, not RMSNorms."""
        return self.family == "nemotron"

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim
