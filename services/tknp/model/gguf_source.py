"""GGUF checkpoints of the `llama` architecture.

Differences from Hugging Face's files that are undone here:
- tensors have other names (`blk.3.attn_q.weight`);
- rows of Q and K are permuted, head by head, for interleaved RoPE (pairs 2i, 2i+1 instead of
  i, i + head_dim/2);
- weights are quantized in blocks along a row, so rows are cut before dequantizing and columns are
  widened to whole blocks, dequantized and trimmed;
- Llama 3.1's RoPE scaling is a tensor of divisors, `rope_freqs.weight`, read with the header.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH, GGMLQuantizationType
from gguf.tensor_mapping import get_tensor_name_map

from tknp.errors import CheckpointError, InvalidValue
from tknp.model.config import ModelConfig
from tknp.model.gguf_header import GgufHeader, read_gguf_header
from tknp.model.source import LM_HEAD, TensorHeader, check_layer_count, tensor_shapes

if TYPE_CHECKING:
    import torch

ROPE_FACTORS = "rope_freqs.weight"
_EMBEDDING, _LM_HEAD = "token_embd.weight", "output.weight"
_PERMUTED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_T = TypeVar("_T", int, float, str)


class GgufSource:
    """The tensors of one GGUF file. The file is mapped on first read; `close` drops the map."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._header = read_gguf_header(path)
        self._map: np.memmap[Any, np.dtype[np.uint8]] | None = None
        self._config = self._read_config()
        check_layer_count(path.name, self._config.layers, len(self._header.tensors))
        names = get_tensor_name_map(MODEL_ARCH.LLAMA, self._config.layers)
        self._stored = {
            name: f"{names.get_name(name.removesuffix('.weight'))}.weight"
            for name in [*tensor_shapes(self._config), LM_HEAD]
        }

    @property
    def config(self) -> ModelConfig:
        return self._config

    @cached_property
    def headers(self) -> Mapping[str, TensorHeader]:
        canonical = {stored: name for name, stored in self._stored.items()}
        return {
            canonical.get(t.name, t.name): TensorHeader(
                stored_name=t.name,
                file=self._path.name,
                shape=t.shape,
                dtype=t.type.name,
                offset_bytes=t.offset_bytes,
                size_bytes=t.size_bytes,
                readable=_readable(t.type),
            )
            for t in self._header.tensors.values()
        }

    @property
    def file_bytes(self) -> Mapping[str, int]:
        return {self._path.name: self._header.size_bytes}

    def expected_name(self, name: str) -> str:
        return self._stored[name]

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        import torch  # header checks do without it

        values = self._dequantize(self._stored[name], rows, columns)
        if name.endswith(_PERMUTED):
            values = _unpermute(values, self._config.head_dim)
        return torch.from_numpy(np.require(values, requirements=["C", "W"]))

    def close(self) -> None:
        self._map = None

    def _dequantize(
        self, name: str, rows: range, columns: range | None
    ) -> np.ndarray[Any, np.dtype[Any]]:
        tensor = self._header.tensors[name]
        block, block_bytes = GGML_QUANT_SIZES[tensor.type]
        if self._map is None:
            self._map = np.memmap(self._path, mode="r")
        end = tensor.offset_bytes + tensor.size_bytes
        stored = self._map[tensor.offset_bytes : end]
        if columns is None:  # a vector: a row of its own, of which `rows` are elements
            columns, matrix = rows, stored[None]
        else:
            matrix = stored.reshape(tensor.shape[0], -1)[rows.start : rows.stop]
        first, last = columns.start // block, -(-columns.stop // block)
        part = np.ascontiguousarray(matrix[:, first * block_bytes : last * block_bytes])
        if part.size == 0:
            values = np.zeros((len(part), len(columns)), np.float32)
        else:
            values = quants.dequantize(part, tensor.type)
        trim = columns.start - first * block
        values = values[:, trim : trim + len(columns)]
        return values if len(tensor.shape) > 1 else values[0]

    def _read_config(self) -> ModelConfig:
        header, file = self._header, self._path.name
        family = header.metadata.get("general.architecture")
        if family != "llama":
            raise CheckpointError(f"{file}: general.architecture={family!r}; expected 'llama'")
        embedding = header.tensors.get(_EMBEDDING)
        if embedding is None:
            raise CheckpointError(f"{file}: tensor {_EMBEDDING} is missing")
        _refuse_other_mathematics(file, header)
        hidden = _get(file, header, "llama.embedding_length", int)
        heads = _get(file, header, "llama.attention.head_count", int)
        kv_heads = _get(file, header, "llama.attention.head_count_kv", int, heads)
        head_dim = _get(file, header, "llama.attention.key_length", int, hidden // max(heads, 1))
        rotary = _get(file, header, "llama.rope.dimension_count", int, head_dim)
        if rotary != head_dim:
            raise CheckpointError(
                f"{file}: llama.rope.dimension_count={rotary}; expected the head size {head_dim}"
            )
        eos = (header.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
        bos = header.metadata.get("tokenizer.ggml.bos_token_id")
        try:
            return ModelConfig(
                vocab_size=embedding.shape[0],
                hidden_size=hidden,
                intermediate_size=_get(file, header, "llama.feed_forward_length", int),
                layers=_get(file, header, "llama.block_count", int),
                q_heads=heads,
                kv_heads=kv_heads,
                head_dim=head_dim,
                max_position=_get(file, header, "llama.context_length", int),
                norm_eps=_get(file, header, "llama.attention.layer_norm_rms_epsilon", float),
                rope_theta=_get(file, header, "llama.rope.freq_base", float, 10_000.0),
                rope_factors=self._rope_factors(head_dim),
                tied_embeddings=_LM_HEAD not in header.tensors,
                bos_id=bos if isinstance(bos, int) else None,
                eos_ids=tuple(dict.fromkeys(i for i in eos if isinstance(i, int))),
            )
        except InvalidValue as error:
            raise CheckpointError(f"{file}: {error}") from error

    def _rope_factors(self, head_dim: int) -> tuple[float, ...] | None:
        tensor = self._header.tensors.get(ROPE_FACTORS)
        if tensor is None:
            return None
        shape, end = (head_dim // 2,), tensor.offset_bytes + tensor.size_bytes
        f32 = tensor.type == GGMLQuantizationType.F32
        if tensor.shape != shape or not f32 or end > self._header.size_bytes:
            raise CheckpointError(
                f"{self._path.name}: tensor {ROPE_FACTORS} is {tensor.type.name} "
                f"{list(tensor.shape)}; expected a whole F32 {list(shape)}"
            )
        factors = self._dequantize(ROPE_FACTORS, range(head_dim // 2), None)
        self.close()
        return tuple(float(factor) for factor in factors)


@cache
def _readable(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package can dequantize `kind`: it says so only when asked to."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    try:
        quants.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _unpermute(
    values: np.ndarray[Any, np.dtype[Any]], head_dim: int
) -> np.ndarray[Any, np.dtype[Any]]:
    """Rows of whole heads from RoPE pairs (2i, 2i+1) to pairs (i, i + head_dim/2)."""
    rows, columns = values.shape
    pairs = values.reshape(rows // head_dim, head_dim // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _refuse_other_mathematics(file: str, header: GgufHeader) -> None:
    for key, neutral, remedy in (
        ("llama.expert_count", 0, "mixtures of experts are not supported"),
        ("llama.rope.scaling.type", "none", "expected 'none' (Llama 3.1 stores rope_freqs.weight)"),
        ("split.count", 1, "merge the parts into one file with llama-gguf-split --merge"),
    ):
        value = header.metadata.get(key, neutral)
        if value not in (neutral, 0):
            raise CheckpointError(f"{file}: {key}={value!r}; {remedy}")


def _get(file: str, header: GgufHeader, key: str, kind: type[_T], default: _T | None = None) -> _T:
    value = header.metadata.get(key, default)
    if not isinstance(value, kind):
        raise CheckpointError(f"{file}: {key}={value!r}; expected {kind.__name__}")
    return value
