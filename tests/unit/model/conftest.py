"""A factory of small GGUF files whose exact contents the test knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

Array = np.ndarray[Any, np.dtype[Any]]
Quant = gguf.GGMLQuantizationType

SHAPE = {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "hidden": 256, "mlp": 512}
VOCAB = 37


@dataclass(frozen=True)
class GgufFile:
    """`values` are the dequantized tensors in Hugging Face's names and row order."""

    path: Path
    values: Mapping[str, Array]


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., GgufFile]:
    """Write a Llama GGUF of SHAPE with every matrix in `quant`.

    `metadata` overrides keys (None drops one), `tensors` overrides or adds stored tensors (None
    drops one); `tied` leaves out the LM head.
    """

    def write(
        quant: Quant = Quant.F32,
        *,
        tied: bool = True,
        architecture: str = "llama",
        metadata: Mapping[str, object] | None = None,
        tensors: Mapping[str, Array | None] | None = None,
    ) -> GgufFile:
        rng = np.random.default_rng(3)
        stored: dict[str, tuple[Array, Quant]] = {}
        values: dict[str, Array] = {}
        for hf, (name, shape) in _tensors(tied).items():
            if len(shape) == 1:
                stored[name] = rng.normal(1, 0.1, shape).astype(np.float32), Quant.F32
                values[hf] = stored[name][0]
                continue
            data = _quantized(rng, shape, quant)
            stored[name] = data, quant
            values[hf] = _dequantized(data, quant)
            if "attn_q" in name or "attn_k" in name:
                values[hf] = values[hf][_half_split_rows(shape[0])]
        for name, data in (tensors or {}).items():
            stored.pop(name, None)
            if data is not None:
                stored[name] = data, Quant.F32

        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        keys: dict[str, object] = {
            "llama.block_count": SHAPE["layers"],
            "llama.context_length": 128,
            "llama.embedding_length": SHAPE["hidden"],
            "llama.feed_forward_length": SHAPE["mlp"],
            "llama.attention.head_count": SHAPE["q_heads"],
            "llama.attention.head_count_kv": SHAPE["kv_heads"],
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 10_000.0,
            "llama.rope.dimension_count": SHAPE["head_dim"],
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 3,
            **(metadata or {}),
        }
        for key, value in keys.items():
            _add_key(writer, key, value)
        for name, (data, kind) in stored.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return GgufFile(path, values)

    return write


def _add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _tensors(tied: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    d, f, dh = SHAPE["hidden"], SHAPE["mlp"], SHAPE["head_dim"]
    q, kv = SHAPE["q_heads"] * dh, SHAPE["kv_heads"] * dh
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("token_embd.weight", (VOCAB, d)),
        "model.norm.weight": ("output_norm.weight", (d,)),
    }
    if not tied:
        names["lm_head.weight"] = ("output.weight", (VOCAB, d))
    for i in range(SHAPE["layers"]):
        hf, ggml = f"model.layers.{i}.", f"blk.{i}."
        names |= {
            f"{hf}input_layernorm.weight": (f"{ggml}attn_norm.weight", (d,)),
            f"{hf}self_attn.q_proj.weight": (f"{ggml}attn_q.weight", (q, d)),
            f"{hf}self_attn.k_proj.weight": (f"{ggml}attn_k.weight", (kv, d)),
            f"{hf}self_attn.v_proj.weight": (f"{ggml}attn_v.weight", (kv, d)),
            f"{hf}self_attn.o_proj.weight": (f"{ggml}attn_output.weight", (d, q)),
            f"{hf}post_attention_layernorm.weight": (f"{ggml}ffn_norm.weight", (d,)),
            f"{hf}mlp.gate_proj.weight": (f"{ggml}ffn_gate.weight", (f, d)),
            f"{hf}mlp.up_proj.weight": (f"{ggml}ffn_up.weight", (f, d)),
            f"{hf}mlp.down_proj.weight": (f"{ggml}ffn_down.weight", (d, f)),
        }
    return names


def _half_split_rows(rows: int) -> list[int]:
    """Stored row of each half-split row: GGUF interleaves row i with row i + dh/2 of a head."""
    dh = SHAPE["head_dim"]
    order = []
    for head in range(rows // dh):
        for row in range(dh):
            half, i = divmod(row, dh // 2)
            order.append(head * dh + 2 * i + half)
    return order


def _quantized(rng: np.random.Generator, shape: tuple[int, ...], quant: Quant) -> Array:
    dense = rng.normal(0, 0.3, shape).astype(np.float32)
    if quant not in (Quant.Q4_K, Quant.Q6_K, Quant.Q8_K):
        return gguf.quants.quantize(dense, quant)
    # The package can't write these: any bytes are a valid block once the scales are sane.
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, block_bytes), dtype=np.uint8)
    scales = {Quant.Q4_K: slice(0, 4), Quant.Q6_K: slice(208, 210), Quant.Q8_K: slice(0, 4)}[quant]
    size = scales.stop - scales.start
    small = rng.uniform(1e-3, 1e-2, (*blocks.shape[:2], size // 2)).astype(np.float16)
    blocks[..., scales] = small.view(np.uint8)
    return blocks.reshape(shape[0], -1)


def _dequantized(data: Array, quant: Quant) -> Array:
    if quant == Quant.Q8_K:
        return data  # nothing can read it, which is what its test is about
    return gguf.quants.dequantize(data, quant)
