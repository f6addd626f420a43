"""Where the tensors of a checkpoint lie: what every weight format has to answer.

A format's reader parses headers only and lists what it found under the canonical names of
`tensor_shapes` (those of Hugging Face's models). `check_tensors` compares that list with what the
configuration demands before a byte of data is read; `TensorSource.read` then reads slices.

    file -> headers -> check_tensors -> read(rows, columns) -> one rank's weights

Imports no torch, so a process that holds no weights can check a checkpoint as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tknp.errors import CheckpointError
from tknp.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
FINAL_NORM_BIAS = "model.norm.bias"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as its file declares it. `stored_name` and `dtype` are the format's own words.

    `offset_bytes` counts from the start of the file. A dtype that can't be read has
    `readable` False.
    """

    stored_name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    offset_bytes: int
    size_bytes: int
    readable: bool = True


class TensorSource(Protocol):
    """The tensors of one checkpoint, by canonical name."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """Every tensor found; those without a canonical name under their stored one."""

    @property
    def file_bytes(self) -> Mapping[str, int]:
        """Actual size of every weight file, by file name."""

    def expected_name(self, name: str) -> str:
        """What this format calls the tensor with canonical `name`."""

    def read(self, name: str, rows: range, columns: range | None) -> torch.Tensor:
        """Rows (and columns, of a matrix) of tensor `name`, as a CPU tensor of any float dtype.

        Rows of the Q and K projections must cover whole heads, as some formats permute rows inside
        a head.
        """

    def close(self) -> None:
        """Release the files; a later `read` opens them again."""


def layer_names(config: ModelConfig, layer: int) -> dict[str, str]:
    """Canonical names of layer `layer`'s tensors, by their place in LayerWeights."""
    prefix = f"model.layers.{layer}."
    names = {
        "input_norm": prefix + "input_layernorm.weight",
        "q": prefix + "self_attn.q_proj.weight",
        "k": prefix + "self_attn.k_proj.weight",
        "v": prefix + "self_attn.v_proj.weight",
        "output": prefix + "self_attn.o_proj.weight",
        "mlp_norm": prefix + "post_attention_layernorm.weight",
        "up": prefix + "mlp.up_proj.weight",
        "down": prefix + "mlp.down_proj.weight",
    }
    if config.gated:
        names["gate"] = prefix + "mlp.gate_proj.weight"
    if config.biased_norms:
        names["input_norm_bias"] = prefix + "input_layernorm.bias"
        names["mlp_norm_bias"] = prefix + "post_attention_layernorm.bias"
    return names


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that a checkpoint of `config` must hold, by canonical name."""
    d, f = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, d), FINAL_NORM: (d,)}
    if config.biased_norms:
        shapes[FINAL_NORM_BIAS] = (d,)
    if not config.tied_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, d)
    by_place: dict[str, tuple[int, ...]] = {
        "input_norm": (d,),
        "input_norm_bias": (d,),
        "q": (config.q_width, d),
        "k": (config.kv_width, d),
        "v": (config.kv_width, d),
        "output": (d, config.q_width),
        "mlp_norm": (d,),
        "mlp_norm_bias": (d,),
        "gate": (f, d),
        "up": (f, d),
        "down": (d, f),
    }
    for layer in range(config.layers):
        shapes |= {name: by_place[place] for place, name in layer_names(config, layer).items()}
    return shapes


def check_layer_count(files: str, layers: int, tensors: int) -> None:
    """Refuse a configuration whose layers can't all be there, before enumerating them."""
    if layers > tensors:
        raise CheckpointError(f"{files} holds {tensors} tensors; {layers} layers need more")


def check_tensors(source: TensorSource) -> None:
    """Raise CheckpointError on the first tensor that is missing, alien, misshapen or cut off.

    Alien tensors are refused because ignoring one (a bias, an expert, a quantization scale) would
    serve wrong text without a word.
    """
    files = ", ".join(source.file_bytes)
    check_layer_count(files, source.config.layers, len(source.headers))
    expected = tensor_shapes(source.config)
    for name, shape in expected.items():
        header = source.headers.get(name)
        if header is None:
            raise CheckpointError(
                f"{files}: tensor {source.expected_name(name)} is missing; expected shape "
                f"{list(shape)}"
            )
        where = f"{header.file}: tensor {header.stored_name}"
        if header.shape != shape:
            raise CheckpointError(
                f"{where} has shape {list(header.shape)}; expected {list(shape)} from the "
                "configuration"
            )
        if not header.readable:
            raise CheckpointError(f"{where} is stored as {header.dtype}, which can't be read")
        end = header.offset_bytes + header.size_bytes
        size = source.file_bytes[header.file]
        if end > size:
            raise CheckpointError(
                f"{where} is truncated: it ends at byte {end}, the file has {size} bytes; "
                "download the file again"
            )
    ignored = {LM_HEAD} if source.config.tied_embeddings else set()
    for name in source.headers.keys() - expected.keys() - ignored:
        header = source.headers[name]
        if not _computed(name):
            raise CheckpointError(
                f"{header.file}: tensor {header.stored_name} has no place in a "
                f"{source.config.family} network; this checkpoint is of another architecture or "
                "quantization"
            )


def _computed(name: str) -> bool:
    """Whether a stored tensor only repeats what the configuration already says of RoPE."""
    return name.endswith((".rotary_emb.inv_freq", ".attn_rot_embd.weight")) or (
        name == "rope_freqs.weight"
    )
