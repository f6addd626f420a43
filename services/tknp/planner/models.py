"""Shapes of published models and the recipes that store their weights.

A recipe says how many bytes a parameter takes by part. FP8 with attention, embeddings and the
MLPs of the first and the last layer in BF16 is what Llama 3.1 405B was published in; it gives the
454 GiB that Decode Token Parallelism, section 3.2, measures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

from tknp.errors import InvalidValue
from tknp.model.config import DType, ModelConfig, RopeScaling
from tknp.model.footprint import Part

if TYPE_CHECKING:
    from collections.abc import Mapping

_LLAMA_31_ROPE = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
)


@dataclass(frozen=True)
class Model:
    """A model to plan for.

    `dtype`: of activations, KV cache and every part of the weights that `bytes_per_parameter`
    doesn't name. `recipe`: that in words.
    """

    name: str
    config: ModelConfig
    dtype: DType = "bfloat16"
    recipe: str = "BF16"
    bytes_per_parameter: Mapping[Part, float] = field(default_factory=dict)


def _llama_31(name: str, hidden: int, intermediate: int, layers: int, q_heads: int) -> Model:
    config = ModelConfig(
        vocab_size=128_256, hidden_size=hidden, intermediate_size=intermediate, layers=layers,
        q_heads=q_heads, kv_heads=8, head_dim=128, max_position=131_072,
        rope_theta=500_000.0, rope_scaling=_LLAMA_31_ROPE,
    )  # fmt: skip
    return Model(name, config)


_FP8_MLP: Mapping[Part, float] = MappingProxyType({"mlp": 1.0, "edge_mlp": 2.0})
_LLAMA_405B = _llama_31("llama-3.1-405b", 16_384, 53_248, 126, 128)
_NEMOTRON_340B = ModelConfig(
    vocab_size=256_000, hidden_size=18_432, intermediate_size=73_728, layers=96, q_heads=96,
    kv_heads=8, head_dim=192, max_position=4096, family="nemotron", partial_rotary_factor=0.5,
)  # fmt: skip
_SMOLLM2 = ModelConfig(
    vocab_size=49_152, hidden_size=576, intermediate_size=1536, layers=30, q_heads=9, kv_heads=3,
    head_dim=64, max_position=8192, rope_theta=100_000.0, tied_embeddings=True,
)  # fmt: skip

MODELS: Mapping[str, Model] = MappingProxyType(
    {
        model.name: model
        for model in (
            _llama_31("llama-3.1-8b", 4096, 14_336, 32, 32),
            _llama_31("llama-3.1-70b", 8192, 28_672, 80, 64),
            Model(
                _LLAMA_405B.name,
                _LLAMA_405B.config,
                recipe="FP8 MLPs but the first and the last, the rest BF16",
                bytes_per_parameter=_FP8_MLP,
            ),
            Model(
                "nemotron-4-340b",
                _NEMOTRON_340B,
                recipe="FP8 MLPs but the first and the last, the rest BF16",
                bytes_per_parameter=_FP8_MLP,
            ),
            Model("smollm2-135m", _SMOLLM2),
        )
    }
)


def known_model(name: str) -> Model:
    """The model called `name`; raises InvalidValue listing all names."""
    if name not in MODELS:
        raise InvalidValue("model", name, f"choose one of {', '.join(MODELS)}")
    return MODELS[name]
