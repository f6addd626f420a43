"""Shapes of a decoder model. Pure: no torch, no files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tknp.errors import InvalidValue

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
class ModelConfig:
    """A Llama-family decoder: RMSNorm, RoPE, GQA, SwiGLU.

    `max_position` is the longest context in tokens that the checkpoint declares. `rope_factors`,
    one a rotary pair, divide the RoPE frequencies: GGUF's form of any frequency scaling.
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
    rope_scaling: RopeScaling | None = None
    rope_factors: tuple[float, ...] | None = None
    tied_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    family: str = "llama"

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
        if self.head_dim % 2:
            raise InvalidValue("head_dim", self.head_dim, "must be even for rotary embedding")
        factors = self.rope_factors
        if factors is not None and (len(factors) != self.head_dim // 2 or min(factors) <= 0):
            raise InvalidValue(
                "rope_factors", factors, f"must be {self.head_dim // 2} numbers above 0"
            )

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.q_heads // self.kv_heads

    @property
    def q_width(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim
