"""`config.json` and `generation_config.json` of a Hugging Face Llama as a ModelConfig.

Accepts what transformers 4 and 5 write (`rope_theta` and `rope_scaling`, or `rope_parameters`).
Whatever would change the mathematics and isn't implemented is refused by name. Absent keys mean
transformers' LlamaConfig defaults, as the format defines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tknp.errors import CheckpointError, InvalidValue
from tknp.model.config import ModelConfig, RopeScaling

Json = Mapping[str, Any]


def read_hf_config(directory: Path) -> ModelConfig:
    """ModelConfig of the checkpoint in `directory`; CheckpointError if it isn't a plain Llama."""
    path = directory / "config.json"
    raw = read_json(path)
    _refuse_other_mathematics(path.name, raw)
    try:
        heads = _integer(raw, "num_attention_heads", 32)
        hidden = _integer(raw, "hidden_size", 4096)
        rope = _rope(raw)
        return ModelConfig(
            vocab_size=_integer(raw, "vocab_size", 32_000),
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size", 11_008),
            layers=_integer(raw, "num_hidden_layers", 32),
            q_heads=heads,
            kv_heads=_integer(raw, "num_key_value_heads", heads),
            head_dim=_integer(raw, "head_dim", hidden // max(heads, 1)),
            max_position=_integer(raw, "max_position_embeddings", 2048),
            norm_eps=_number(raw, "rms_norm_eps", 1e-6),
            rope_theta=_number(rope, "rope_theta", 10_000.0),
            rope_scaling=_rope_scaling(rope),
            tied_embeddings=_flag(raw, "tie_word_embeddings"),
            bos_id=next(iter(_ids(raw, "bos_token_id", (1,))), None),
            eos_ids=_eos_ids(directory, raw),
        )
    except InvalidValue as error:
        raise CheckpointError(f"{path.name}: {error}") from error


def read_json(path: Path) -> Json:
    """The JSON object in `path`, or CheckpointError saying what is wrong with the file."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path.name} holds {type(raw).__name__}; expected a JSON object")
    return raw


def _refuse_other_mathematics(file: str, raw: Json) -> None:
    family = raw.get("model_type")
    # Mistral without its sliding window is Llama, layer by layer and name by name.
    if family != "llama" and not (family == "mistral" and raw.get("sliding_window") is None):
        window = " with a sliding window" if family == "mistral" else ""
        raise CheckpointError(f"{file}: model_type={family!r}{window}; expected 'llama'")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{file}: hidden_act={raw['hidden_act']!r}; expected 'silu'")
    for bias in ("attention_bias", "mlp_bias"):
        if raw.get(bias):
            raise CheckpointError(f"{file}: {bias}=true; expected a Llama without biases")
    if raw.get("quantization_config"):
        raise CheckpointError(
            f"{file}: quantization_config is set; expected float32, float16 or bfloat16 weights "
            "(or a quantized GGUF)"
        )


def _rope(raw: Json) -> Json:
    """The RoPE settings as one mapping, wherever the version that wrote the file put them."""
    legacy = raw.get("rope_scaling") or {}
    rope = {**legacy, **(raw.get("rope_parameters") or {})}
    if raw.get("rope_theta") is not None:
        rope.setdefault("rope_theta", raw["rope_theta"])
    return rope


def _rope_scaling(rope: Json) -> RopeScaling | None:
    if _number(rope, "partial_rotary_factor", 1.0) != 1.0:
        raise InvalidValue("partial_rotary_factor", rope["partial_rotary_factor"], "expected 1.0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InvalidValue("rope_type", kind, "expected 'default' or 'llama3'")
    return RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position=_integer(rope, "original_max_position_embeddings"),
    )


def _eos_ids(directory: Path, raw: Json) -> tuple[int, ...]:
    """Ids that end a text: config.json's and those generation_config.json adds, in this order."""
    ids = list(_ids(raw, "eos_token_id", (2,)))
    generation = directory / "generation_config.json"
    if generation.exists():
        ids += _ids(read_json(generation), "eos_token_id", ())
    return tuple(dict.fromkeys(ids))


def _ids(raw: Json, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    value = raw.get(key, default)
    ids = tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
    if not all(type(i) is int and i >= 0 for i in ids):
        raise InvalidValue(key, value, "expected token ids, integers of at least 0")
    return ids


def _integer(raw: Json, key: str, default: int | None = None) -> int:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) is not int:
        raise InvalidValue(key, value, "expected an integer")
    return value


def _number(raw: Json, key: str, default: float | None = None) -> float:
    value = raw.get(key)
    value = default if value is None else value
    if type(value) not in (int, float):
        raise InvalidValue(key, value, "expected a number")
    return float(value)  # type: ignore[arg-type]  # narrowed by the check above


def _flag(raw: Json, key: str) -> bool:
    value = raw.get(key, False)
    if type(value) is not bool:
        raise InvalidValue(key, value, "expected true or false")
    return value
