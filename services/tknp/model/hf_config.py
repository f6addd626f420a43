"""`config.json` and `generation_config.json` of a Hugging Face checkpoint as a ModelConfig.

Accepts what transformers 4 and 5 write (`rope_theta` and `rope_scaling`, or `rope_parameters`) and
NeMo's exports. Whatever would change the mathematics and isn't implemented is refused by name.
Absent keys mean the defaults of transformers' configuration classes, as the format defines.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tknp.errors import CheckpointError, InvalidValue
from tknp.model.config import Family, LinearScaling, ModelConfig, RopeScaling

Json = Mapping[str, Any]


@dataclass(frozen=True)
class _Format:
    """How one family spells its configuration, and what absent keys mean."""

    family: Family
    activation: str
    eps_key: str
    rope_types: tuple[str, ...]
    defaults: Json


_LLAMA = _Format(
    family="llama",
    activation="silu",
    eps_key="rms_norm_eps",
    rope_types=("default", "linear", "llama3"),
    defaults={
        "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6, "partial_rotary_factor": 1.0, "bos_token_id": 1, "eos_token_id": 2,
    },
)  # fmt: skip
_NEMOTRON = _Format(
    family="nemotron",
    activation="relu2",
    eps_key="norm_eps",
    rope_types=("default", "linear"),
    defaults={
        "vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576,
        "num_hidden_layers": 32, "num_attention_heads": 48, "max_position_embeddings": 4096,
        "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "bos_token_id": 2, "eos_token_id": 3,
    },
)  # fmt: skip


def read_hf_config(directory: Path) -> ModelConfig:
    """ModelConfig of the checkpoint in `directory`; CheckpointError if it is of no known family."""
    path = directory / "config.json"
    given = read_json(path)
    form = _format(path.name, given)
    # null asks for the default, except where it says that there is no such token.
    raw = {**form.defaults, **{k: v for k, v in given.items() if v is not None or _is_id(k)}}
    try:
        _refuse_other_mathematics(form, raw)
        heads = _integer(raw, "num_attention_heads")
        hidden = _integer(raw, "hidden_size")
        rope = _rope(raw)
        return ModelConfig(
            vocab_size=_integer(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(raw, "intermediate_size"),
            layers=_integer(raw, "num_hidden_layers"),
            q_heads=heads,
            kv_heads=_integer(raw, "num_key_value_heads", heads),
            head_dim=_integer(raw, "head_dim", hidden // max(heads, 1)),
            max_position=_integer(raw, "max_position_embeddings"),
            norm_eps=_number(raw, form.eps_key),
            rope_theta=_number(rope, "rope_theta", 10_000.0),
            rope_scaling=_rope_scaling(form, rope),
            partial_rotary_factor=_partial_rotary(form, rope),
            tied_embeddings=_flag(raw, "tie_word_embeddings"),
            bos_id=next(iter(_ids(raw, "bos_token_id")), None),
            eos_ids=_eos_ids(directory, raw),
            family=form.family,
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


def _format(file: str, raw: Json) -> _Format:
    kind = raw.get("model_type")
    # Mistral without its sliding window is Llama, layer by layer and name by name.
    if kind == "llama" or (kind == "mistral" and raw.get("sliding_window") is None):
        return _LLAMA
    if kind == "nemotron":
        return _NEMOTRON
    window = " with a sliding window" if kind == "mistral" else ""
    raise CheckpointError(f"{file}: model_type={kind!r}{window}; expected 'llama' or 'nemotron'")


def _refuse_other_mathematics(form: _Format, raw: Json) -> None:
    activation = raw.get("hidden_act", form.activation)
    if activation != form.activation:
        raise InvalidValue("hidden_act", activation, f"expected {form.activation!r}")
    for bias in ("attention_bias", "mlp_bias"):
        if _flag(raw, bias):
            raise InvalidValue(bias, True, "expected projections without biases")
    if raw.get("quantization_config"):
        raise InvalidValue(
            "quantization_config", "set",
            "expected float32, float16 or bfloat16 weights (or a quantized GGUF)",
        )  # fmt: skip


def _rope(raw: Json) -> Json:
    """The RoPE settings as one mapping, wherever the version that wrote the file put them."""
    outer = {key: raw[key] for key in ("rope_theta", "partial_rotary_factor") if key in raw}
    legacy = raw.get("rope_scaling") or {}
    return {**outer, **legacy, **(raw.get("rope_parameters") or {})}


def _partial_rotary(form: _Format, rope: Json) -> float:
    """Llama's own implementation rotates whole heads whatever the key says, so we refuse it."""
    factor = _number(rope, "partial_rotary_factor")
    if form.family == "llama" and factor != 1.0:
        raise InvalidValue("partial_rotary_factor", factor, "expected 1.0 of a Llama")
    return factor


def _rope_scaling(form: _Format, rope: Json) -> RopeScaling | LinearScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in form.rope_types:
        raise InvalidValue("rope_type", kind, f"expected one of {', '.join(form.rope_types)}")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(_number(rope, "factor"))
    return RopeScaling(
        factor=_number(rope, "factor"),
        low_freq_factor=_number(rope, "low_freq_factor"),
        high_freq_factor=_number(rope, "high_freq_factor"),
        original_max_position=_integer(rope, "original_max_position_embeddings"),
    )


def _eos_ids(directory: Path, raw: Json) -> tuple[int, ...]:
    """Ids that end a text: config.json's and those generation_config.json adds, in this order."""
    ids = list(_ids(raw, "eos_token_id"))
    generation = directory / "generation_config.json"
    if generation.exists():
        ids += _ids(read_json(generation), "eos_token_id")
    return tuple(dict.fromkeys(ids))


def _is_id(key: str) -> bool:
    return key in ("bos_token_id", "eos_token_id")


def _ids(raw: Json, key: str) -> tuple[int, ...]:
    value = raw.get(key)
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
