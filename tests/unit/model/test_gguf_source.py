from __future__ import annotations

import contextlib
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tknp.errors import CheckpointError
from tknp.model.checkpoint import open_checkpoint
from tknp.model.gguf_header import read_gguf_header
from tknp.model.rope import rope_table
from tknp.model.shard import Shard
from tknp.model.weights import ShardWeights

WriteGguf = Callable[..., Any]
LAYER = "model.layers.1."


def expected_layer(values: dict[str, np.ndarray], shard: Shard) -> dict[str, np.ndarray]:
    """Layer 1's fused matrices of `shard`, cut from whole tensors head by head."""
    dh = shard.config.head_dim

    def rows(name: str, heads: range) -> np.ndarray:
        whole = values[f"{LAYER}self_attn.{name}_proj.weight"]
        return np.concatenate([whole[h * dh : (h + 1) * dh] for h in heads])

    columns = [h * dh + i for h in shard.q_heads for i in range(dh)]
    mlp = list(shard.mlp_columns)
    return {
        "input_norm": values[LAYER + "input_layernorm.weight"],
        "qkv": np.concatenate(
            [rows("q", shard.q_heads), rows("k", shard.kv_heads), rows("v", shard.kv_heads)]
        ),
        "output": values[LAYER + "self_attn.o_proj.weight"][:, columns],
        "mlp_norm": values[LAYER + "post_attention_layernorm.weight"],
        "gate_up": np.concatenate(
            [values[f"{LAYER}mlp.{name}_proj.weight"][mlp] for name in ("gate", "up")]
        ),
        "down": values[LAYER + "mlp.down_proj.weight"][:, mlp],
    }


@pytest.mark.parametrize(
    "quant",
    [Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_0, Quant.Q4_1, Quant.Q5_0, Quant.Q5_1,
     Quant.Q4_K, Quant.Q6_K],
    ids=lambda quant: quant.name,
)  # fmt: skip
def test_every_slice_equals_the_dequantized_tensor(write_gguf: WriteGguf, quant: Quant) -> None:
    file = write_gguf(quant, tied=False)
    checkpoint = open_checkpoint(file.path)
    assert not checkpoint.config.tied_embeddings
    for tp in (1, 2, 4):
        heads, embeddings = [], []
        for rank in range(tp):
            shard = Shard(checkpoint.config, 1, 2, True, True, tp, rank)
            weights = checkpoint.load(shard, torch.float32)
            for place, expected in expected_layer(file.values, shard).items():
                actual = getattr(weights.layers[1], place)
                np.testing.assert_array_equal(actual.numpy(), expected, err_msg=f"{place} of {tp}")
            assert weights.head is not None
            assert weights.embedding is not None
            heads.append(weights.head.numpy())
            embeddings.append(weights.embedding.numpy())
        np.testing.assert_array_equal(np.concatenate(heads), file.values["lm_head.weight"])
        np.testing.assert_array_equal(
            np.concatenate(embeddings), file.values["model.embed_tokens.weight"]
        )


def test_slices_that_cut_heads_equal_the_whole(write_gguf: WriteGguf) -> None:
    """Rows of q and k are permuted inside heads: a part of a head needs the whole of it read."""
    checkpoint = open_checkpoint(write_gguf(Quant.Q4_1).path)
    config = checkpoint.config
    whole = checkpoint.load(Shard(config, 1, 2, False, False, 2, 1), torch.float32).layers[1]
    cuts = [Shard(config, 1, 2, False, False, 2, 1, 6, 2 * n + 1, "dense") for n in range(3)]
    parts = [checkpoint.load(cut, torch.float32).layers[1] for cut in cuts]
    widths = [[len(c.q_columns), len(c.kv_columns), len(c.kv_columns)] for c in cuts]
    assert widths[0] == [43, 22, 22]  # of 128 and 64
    split = [part.qkv.split(width) for part, width in zip(parts, widths, strict=True)]
    assert torch.equal(torch.cat([torch.cat(p) for p in zip(*split, strict=True)]), whole.qkv)
    assert torch.equal(torch.cat([part.output for part in parts], 1), whole.output)


def test_configuration_comes_from_metadata(write_gguf: WriteGguf) -> None:
    config = open_checkpoint(write_gguf().path).config
    assert (config.layers, config.q_heads, config.kv_heads, config.head_dim) == (2, 4, 2, 64)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (37, 256, 512)
    assert (config.bos_id, config.eos_ids, config.max_position) == (1, (2, 3), 128)
    assert config.tied_embeddings
    assert config.norm_eps == pytest.approx(1e-5)


def test_tied_head_is_the_embedding_itself(write_gguf: WriteGguf) -> None:
    checkpoint = open_checkpoint(write_gguf().path)
    both: ShardWeights = checkpoint.load(Shard(checkpoint.config, 0, 2, True, True), torch.float32)
    assert both.head is both.embedding
    alone = checkpoint.load(Shard(checkpoint.config, 2, 2, False, True), torch.float32)
    assert alone.embedding is None
    torch.testing.assert_close(alone.head, both.head, rtol=0, atol=0)


def test_rope_factors_reproduce_llama3_scaling(write_gguf: WriteGguf) -> None:
    scaled = LlamaConfig(
        head_dim=64,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    )  # fmt: skip
    plain = LlamaConfig(head_dim=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    oracle = LlamaRotaryEmbedding(scaled)
    factors = (LlamaRotaryEmbedding(plain).inv_freq / oracle.inv_freq).numpy()
    checkpoint = open_checkpoint(write_gguf(tensors={"rope_freqs.weight": factors}).path)
    checkpoint.validate()
    assert min(checkpoint.config.rope_factors or ()) == 1.0
    assert max(checkpoint.config.rope_factors or ()) == 8.0
    positions = torch.arange(100)
    cos, sin = rope_table(checkpoint.config, positions)
    expected_cos, expected_sin = oracle(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos, expected_cos[0, :, :32], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected_sin[0, :, :32], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "qwen2"}, ["general.architecture", "qwen2", "llama"]),
        ({"metadata": {"llama.expert_count": 8}}, ["llama.expert_count", "experts"]),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, ["rope.scaling.type", "yarn"]),
        ({"metadata": {"split.count": 2}}, ["split.count", "merge"]),
        ({"metadata": {"llama.block_count": None}}, ["llama.block_count", "int"]),
        ({"metadata": {"llama.rope.dimension_count": 32}}, ["rope.dimension_count", "64"]),
        ({"metadata": {"llama.attention.head_count_kv": 3}}, ["q_heads", "multiple"]),
        ({"tensors": {"token_embd.weight": None}}, ["token_embd.weight", "missing"]),
        ({"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}}, ["rope_freqs", "[32]"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_is_not_llama_is_refused_on_opening(
    write_gguf: WriteGguf, change: dict[str, object], words: list[str]
) -> None:
    path = write_gguf(**change).path
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in ["model.gguf", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"blk.1.ffn_up.weight": None}, ["blk.1.ffn_up.weight", "missing", "[512, 256]"]),
        (
            {"blk.0.attn_k.weight": np.zeros((64, 256), np.float32)},
            ["blk.0.attn_k.weight", "[64, 256]", "[128, 256]"],
        ),
        ({"blk.0.attn_q.bias": np.zeros(256, np.float32)}, ["blk.0.attn_q.bias", "no place"]),
    ],
    ids=["missing", "misshapen", "alien"],
)
def test_tensors_that_do_not_fit_are_refused(
    write_gguf: WriteGguf, tensors: dict[str, object], words: list[str]
) -> None:
    checkpoint = open_checkpoint(write_gguf(tensors=tensors).path)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.validate()
    for word in ["model.gguf", *words]:
        assert word in str(caught.value)


def test_unreadable_quantization_is_refused_by_name(write_gguf: WriteGguf) -> None:
    checkpoint = open_checkpoint(write_gguf(Quant.Q8_K).path)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is stored as Q8_K"):
        checkpoint.validate()


def test_truncated_data_is_refused_by_tensor(write_gguf: WriteGguf) -> None:
    path = write_gguf().path
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - 1000])
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match=r"blk\.1\.\S+ is truncated.*download"):
        checkpoint.load(Shard(checkpoint.config, 0, 1, False, False), torch.float32)


@pytest.mark.parametrize("keep", [4, 10, 100, 700])
def test_truncated_header_is_refused(write_gguf: WriteGguf, keep: int) -> None:
    path = write_gguf().path
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.gguf is truncated inside its header"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "can't be read|not a GGUF"),
        (b"PK\x03\x04" * 20, "not a GGUF file"),
        (b"GGUF\x01\x00\x00\x00" + bytes(64), "GGUF version 1"),
        (b"GGUF\x00\x00\x00\x03" + bytes(64), "little-endian"),
    ],
)
def test_other_files_are_refused(tmp_path: Any, data: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


def test_any_damaged_byte_of_a_header_is_refused_or_harmless(write_gguf: WriteGguf) -> None:
    path = write_gguf(metadata={"tokenizer.ggml.scores": [0.5, 1.5]}).path
    header = min(t.offset_bytes for t in read_gguf_header(path).tensors.values())
    random = Random(0)
    with path.open("r+b", buffering=0) as file:
        for _ in range(150):
            position = random.randrange(header)
            file.seek(position)
            byte = file.read(1)
            file.seek(position)
            file.write(bytes([byte[0] ^ 1 << random.randrange(8)]))
            with contextlib.suppress(CheckpointError):
                open_checkpoint(path).validate()
            file.seek(position)
            file.write(byte)


def test_absurd_layer_count_is_refused_at_once(write_gguf: WriteGguf) -> None:
    path = write_gguf(metadata={"llama.block_count": (1 << 32) - 1}).path
    with pytest.raises(CheckpointError, match=r"holds 20 tensors; 4294967295 layers need more"):
        open_checkpoint(path)
