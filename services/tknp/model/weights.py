"""One rank's weights: its layer range, its TP slice, in one dtype on one device.

Projections that read the same input are stored as one matrix, so that each is one matrix product:

    qkv      [q heads | k heads | v heads] rows      column-parallel
    output   columns of the same q heads             row-parallel
    gate_up  [gate columns | up columns] rows        column-parallel
    down     the same MLP columns                    row-parallel

Every matrix is allocated once and filled from the checkpoint in pieces, so that loading needs
little memory beyond the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from tknp.model.shard import Shard
from tknp.model.source import EMBEDDING, FINAL_NORM, LM_HEAD, TensorSource, layer_names

Progress = Callable[[int, int], None]
_PIECE_BYTES = 16 << 20  # of float32: bounds what dequantizing needs beside the weights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer on one of T ranks; D is the hidden size, F_t the MLP columns of a rank."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(Hq_t + 2 Hkv_t) dh, D]
    output: Tensor  # [D, Hq_t dh]
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F_t, D]
    down: Tensor  # [D, F_t]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ShardWeights:
    """All weights of one rank. `embedding` and `head` are [V_t, D]; tied, one tensor is both."""

    shard: Shard
    layers: Mapping[int, LayerWeights]
    embedding: Tensor | None = None
    final_norm: Tensor | None = None
    head: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes held, a shared matrix counted once."""
        ends = [t for t in (self.embedding, self.final_norm, self.head) if t is not None]
        held = [t for layer in self.layers.values() for t in layer.tensors] + ends
        return sum(t.nbytes for t in {id(t): t for t in held}.values())


class _Part(NamedTuple):
    """Rows (and columns) of checkpoint tensor `name` that fill `target`."""

    target: Tensor
    name: str
    rows: range
    columns: range | None = None


def load_shard(
    source: TensorSource,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> ShardWeights:
    """Read what `shard` needs and nothing else.

    `progress` is called with bytes filled so far and in all, as they count in `dtype`. The source
    must have passed `check_tensors`.
    """

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    config = shard.config
    d = config.hidden_size
    layers = {
        layer: LayerWeights(
            input_norm=empty(d),
            qkv=empty(shard.qkv_width, d),
            output=empty(d, shard.q_width),
            mlp_norm=empty(d),
            gate_up=empty(2 * len(shard.mlp_columns), d),
            down=empty(d, len(shard.mlp_columns)),
        )
        for layer in shard.layers
    }
    embedding = empty(len(shard.vocab), d) if shard.embedding else None
    final_norm = empty(d) if shard.head else None
    tied_here = config.tied_embeddings and embedding is not None
    head = (embedding if tied_here else empty(len(shard.vocab), d)) if shard.head else None
    weights = ShardWeights(shard, layers, embedding, final_norm, head)

    done = 0
    try:
        for part in _parts(weights):
            for piece in _pieces(part, config.head_dim):
                piece.target.copy_(source.read(piece.name, piece.rows, piece.columns))
                done += piece.target.nbytes
                if progress is not None:
                    progress(done, weights.size_bytes)
    finally:
        source.close()
    return weights


def _parts(weights: ShardWeights) -> Iterator[_Part]:
    shard = weights.shard
    every = range(shard.config.hidden_size)
    if weights.embedding is not None:
        yield _Part(weights.embedding, EMBEDDING, shard.vocab, every)
    for layer, target in weights.layers.items():
        yield from _layer_parts(shard, layer, target)
    if weights.final_norm is not None:
        yield _Part(weights.final_norm, FINAL_NORM, every)
    if weights.head is not None and weights.head is not weights.embedding:
        name = EMBEDDING if shard.config.tied_embeddings else LM_HEAD
        yield _Part(weights.head, name, shard.vocab, every)


def _layer_parts(shard: Shard, layer: int, target: LayerWeights) -> Iterator[_Part]:
    every = range(shard.config.hidden_size)
    q_rows, kv_rows = _head_rows(shard, shard.q_heads), _head_rows(shard, shard.kv_heads)
    q, k, v = torch.split(target.qkv, [shard.q_width, shard.kv_width, shard.kv_width])
    gate, up = target.gate_up.chunk(2)
    names = layer_names(layer)
    yield _Part(target.input_norm, names["input_norm"], every)
    yield _Part(q, names["q"], q_rows, every)
    yield _Part(k, names["k"], kv_rows, every)
    yield _Part(v, names["v"], kv_rows, every)
    yield _Part(target.output, names["output"], every, q_rows)
    yield _Part(target.mlp_norm, names["mlp_norm"], every)
    yield _Part(gate, names["gate"], shard.mlp_columns, every)
    yield _Part(up, names["up"], shard.mlp_columns, every)
    yield _Part(target.down, names["down"], every, shard.mlp_columns)


def _head_rows(shard: Shard, heads: range) -> range:
    dh = shard.config.head_dim
    return range(heads.start * dh, heads.stop * dh)


def _pieces(part: _Part, head_dim: int) -> Iterator[_Part]:
    """Cut a part into runs of rows that are small in float32, whole heads each."""
    width = 1 if part.columns is None else max(len(part.columns), 1)
    step = max(_PIECE_BYTES // (4 * width * head_dim), 1) * head_dim
    for start in range(0, len(part.rows), step):
        rows = part.rows[start : start + step]
        yield part._replace(target=part.target[start : start + len(rows)], rows=rows)
