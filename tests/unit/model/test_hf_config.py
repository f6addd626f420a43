from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tknp.errors import CheckpointError
from tknp.model.config import LinearScaling, RopeScaling
from tknp.model.hf_config import read_hf_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 261,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def write(directory: Path, generation: object = None, **change: object) -> Path:
    raw = {k: v for k, v in {**LLAMA, **change}.items() if v != "absent"}
    (directory / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_fields_and_defaults(tmp_path: Path) -> None:
    config = read_hf_config(write(tmp_path, num_key_value_heads="absent", rms_norm_eps="absent"))
    assert (config.layers, config.q_heads, config.kv_heads, config.head_dim) == (3, 4, 4, 16)
    assert (config.norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10_000.0, None)
    assert (config.bos_id, config.eos_ids, config.tied_embeddings) == (256, (257,), False)


def test_head_dim_may_differ_from_hidden_size_over_heads(tmp_path: Path) -> None:
    assert read_hf_config(write(tmp_path, head_dim=32)).q_width == 128
    assert read_hf_config(write(tmp_path, head_dim=None)).q_width == 64


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500_000.0, "rope_scaling": SCALING},
        {"rope_theta": 500_000.0, "rope_scaling": {**SCALING, "rope_type": "absent"}},
        {"rope_parameters": {"rope_theta": 500_000.0, **SCALING}},
    ],
    ids=["transformers-4", "legacy-type", "transformers-5"],
)
def test_llama3_scaling_wherever_it_is_written(tmp_path: Path, change: dict[str, Any]) -> None:
    legacy = change.get("rope_scaling", {})
    if legacy.get("rope_type") == "absent":
        legacy["type"] = "llama3"
        del legacy["rope_type"]
    config = read_hf_config(write(tmp_path, **change))
    assert config.rope_theta == 500_000.0
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (257, {"eos_token_id": [258, 257]}, (257, 258)),
        ([257, 259], {}, (257, 259)),
        (None, {"eos_token_id": 258}, (258,)),
        (None, None, ()),
    ],
)
def test_eos_ids_are_merged(
    tmp_path: Path, eos: object, generation: object, expected: tuple[int, ...]
) -> None:
    assert read_hf_config(write(tmp_path, generation, eos_token_id=eos)).eos_ids == expected


def test_mistral_without_a_window_is_llama(tmp_path: Path) -> None:
    assert read_hf_config(write(tmp_path, model_type="mistral", sliding_window=None)).layers == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "qwen2"}, ["model_type='qwen2'", "'llama'"]),
        ({"model_type": "mistral", "sliding_window": 4096}, ["mistral", "sliding window"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu'"]),
        ({"attention_bias": True}, ["attention_bias=True", "without biases"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type='dynamic'", "llama3"]),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ["factor=0.0", "above 0"]),
        ({"rope_scaling": {"rope_type": "llama3"}}, ["factor=None", "number"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor=0.5"]),
        ({"hidden_size": "64"}, ["hidden_size='64'", "integer"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers=True", "integer"]),
        ({"rms_norm_eps": "tiny"}, ["rms_norm_eps='tiny'", "number"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1", "true or false"]),
        ({"eos_token_id": [-1]}, ["eos_token_id=[-1]"]),
        ({"num_key_value_heads": 3}, ["q_heads=4", "multiple"]),
        ({"num_hidden_layers": 0}, ["layers=0", "at least 1"]),
        ({"head_dim": 15}, ["head_dim=15", "even"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_not_a_plain_llama_is_refused(
    tmp_path: Path, change: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(write(tmp_path, **change))
    for word in ["config.json", *words]:
        assert word in str(caught.value)


NEMOTRON: dict[str, Any] = {
    **dict.fromkeys(("rms_norm_eps", "bos_token_id", "eos_token_id"), "absent"),
    "model_type": "nemotron",
    "hidden_act": "relu2",
    "norm_eps": 1e-5,
    "kv_channels": 16,
    "head_dim": None,
}


def test_nemotron(tmp_path: Path) -> None:
    config = read_hf_config(write(tmp_path, **NEMOTRON))
    assert (config.family, config.gated, config.biased_norms) == ("nemotron", False, True)
    assert (config.head_dim, config.rotary_dim, config.rope_scaling) == (16, 8, None)
    assert (config.bos_id, config.eos_ids, config.tied_embeddings) == (2, (3,), False)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_percent": 0.25, "partial_rotary_factor": 0.25, "rope_theta": 5e5,
         "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 5e5,
                             "partial_rotary_factor": 0.25}},
    ],
    ids=["as-on-hubs", "transformers-5"],
)  # fmt: skip
def test_nemotron_rope_wherever_it_is_written(tmp_path: Path, change: dict[str, Any]) -> None:
    config = read_hf_config(write(tmp_path, **{**NEMOTRON, **change}))
    assert (config.rotary_dim, config.rope_theta) == (4, 5e5)
    assert config.rope_scaling == LinearScaling(4.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_act": "silu"}, ["hidden_act='silu'", "relu2"]),
        ({"rope_scaling": SCALING}, ["rope_type='llama3'", "linear"]),
        ({"partial_rotary_factor": 0.2}, ["partial_rotary_factor=0.2", "even"]),
        ({"partial_rotary_factor": 1.5}, ["partial_rotary_factor=1.5", "even"]),
        ({"partial_rotary_factor": 0}, ["partial_rotary_factor=0"]),
        ({"norm_eps": "tiny"}, ["norm_eps='tiny'"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
    ],
)
def test_what_is_not_nemotron_is_refused(
    tmp_path: Path, change: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_hf_config(write(tmp_path, **{**NEMOTRON, **change}))
    for word in ["config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config.json is missing"),
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json holds list"),
    ],
)
def test_unreadable_json_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_hf_config(tmp_path)
