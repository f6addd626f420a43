"""One rank's weights: its layer range, its TP slice, in one dtype on one device.

Projections that read the same input are stored as one matrix, so that each is one matrix product:

    qkv      [q columns | k columns | v columns] as rows  column-parallel
    output   columns of the same q heads                  row-parallel
    gate_up  [gate columns | up columns] as rows          column-parallel; without a gate, up alone
    down     the same MLP columns                         row-parallel

Where dense work is spread over nodes, `output` holds part of its TP slice's columns, and so does
`qkv` if the shard projects a part (see `Shard`).

Every matrix is allocated once and filled from the checkpoint in pieces, so that loading needs
little memory beyond the weights themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from tknp.model.rope import loaded_order
from tknp.model.shard import Shard
from tknp.model.source import (
    EMBEDDING,
    FINAL_NORM,
    FINAL_NORM_BIAS,
    LM_HEAD,
    TensorSource,
    layer_names,
)

Progress = Callable[[int, int], None]
_PIECE_BYTES = 16 << 20  # of float32: bounds what dequantizing needs beside the weights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer on one rank; D is the hidden size, F_t the MLP columns of a rank."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [projected_width, D]
    output: Tensor  # [D, output_columns]
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2 F_t, D], or [F_t, D] without a gate
    down: Tensor  # [D, F_t]
    input_norm_bias: Tensor | None = None  # [D]
    mlp_norm_bias: Tensor | None = None  # [D]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        values = (getattr(self, field.name) for field in fields(self))
        return tuple(value for value in values if value is not None)


@dataclass(frozen=True)
class ShardWeights:
    """All weights of one rank. `embedding` and `head` are [V_t, D]; tied, one tensor is both."""

    shard: Shard
    layers: Mapping[int, LayerWeights]
    embedding: Tensor | None = None
    final_norm: Tensor | None = None
    head: Tensor | None = None
    final_norm_bias: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes held, a shared matrix counted once."""
        ends = (self.embedding, self.final_norm, self.final_norm_bias, self.head)
        held = [t for layer in self.layers.values() for t in layer.tensors]
        held += [t for t in ends if t is not None]
        return sum(t.nbytes for t in {id(t): t for t in held}.values())


class _Part(NamedTuple):
    """Rows (and columns) of checkpoint tensor `name` that fill `target`.

    `heads`: rows of Q or K, which are stored in another order inside a head.
    """

    target: Tensor
    name: str
    rows: range
    columns: range | None = None
    heads: bool = False


class _Piece(NamedTuple):
    """`kept` of the rows `read` fill `target`; `read` is `kept` widened to whole heads."""

    target: Tensor
    read: range
    kept: range


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
    d, f = config.hidden_size, len(shard.mlp_columns)
    layers = {
        layer: LayerWeights(
            input_norm=empty(d),
            qkv=empty(shard.projected_width, d),
            output=empty(d, len(shard.output_columns)),
            mlp_norm=empty(d),
            gate_up=empty(2 * f if config.gated else f, d),
            down=empty(d, f),
            input_norm_bias=empty(d) if config.biased_norms else None,
            mlp_norm_bias=empty(d) if config.biased_norms else None,
        )
        for layer in shard.layers
    }
    embedding = empty(len(shard.vocab), d) if shard.embedding else None
    final_norm = empty(d) if shard.head else None
    tied_here = config.tied_embeddings and embedding is not None
    head = (embedding if tied_here else empty(len(shard.vocab), d)) if shard.head else None
    bias = empty(d) if shard.head and config.biased_norms else None
    weights = ShardWeights(shard, layers, embedding, final_norm, head, bias)

    order = loaded_order(config)
    done = 0
    try:
        for part in _parts(weights):
            for piece in _pieces(part, config.head_dim):
                values = source.read(part.name, piece.read, part.columns)
                if part.heads and order is not None:
                    heads = values.view(-1, config.head_dim, values.shape[1])
                    values = heads[:, order].flatten(0, 1)
                first = piece.kept.start - piece.read.start
                piece.target.copy_(values[first : first + len(piece.kept)])
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
    if weights.final_norm_bias is not None:
        yield _Part(weights.final_norm_bias, FINAL_NORM_BIAS, every)
    if weights.head is not None and weights.head is not weights.embedding:
        name = EMBEDDING if shard.config.tied_embeddings else LM_HEAD
        yield _Part(weights.head, name, shard.vocab, every)


def _layer_parts(shard: Shard, layer: int, target: LayerWeights) -> Iterator[_Part]:
    every = range(shard.config.hidden_size)
    dh = shard.config.head_dim
    first_q, first_kv = shard.q_heads.start * dh, shard.kv_heads.start * dh
    q_rows, kv_rows = _shifted(shard.q_columns, first_q), _shifted(shard.kv_columns, first_kv)
    q, k, v = torch.split(target.qkv, [len(q_rows), len(kv_rows), len(kv_rows)])
    *gate, up = torch.split(target.gate_up, len(shard.mlp_columns))
    names = layer_names(shard.config, layer)
    yield _Part(target.input_norm, names["input_norm"], every)
    yield _Part(q, names["q"], q_rows, every, heads=True)
    yield _Part(k, names["k"], kv_rows, every, heads=True)
    yield _Part(v, names["v"], kv_rows, every)
    yield _Part(target.output, names["output"], every, _shifted(shard.output_columns, first_q))
    yield _Part(target.mlp_norm, names["mlp_norm"], every)
    for part in gate:
        yield _Part(part, names["gate"], shard.mlp_columns, every)
    yield _Part(up, names["up"], shard.mlp_columns, every)
    yield _Part(target.down, names["down"], every, shard.mlp_columns)
    for place in ("input_norm_bias", "mlp_norm_bias"):
        bias = getattr(target, place)
        if bias is not None:
            yield _Part(bias, names[place], every)


def _shifted(columns: range, by: int) -> range:
    return range(columns.start + by, columns.stop + by)


def _pieces(part: _Part, head_dim: int) -> Iterator[_Piece]:
    """Cut a part into runs of rows that are small in float32, of whole heads where it has them."""
    rows, unit = part.rows, head_dim if part.heads else 1
    width = 1 if part.columns is None else max(len(part.columns), 1)
    step = max(_PIECE_BYTES // (4 * width * unit), 1) * unit
    if not rows:
        return
    stop = -(-rows.stop // unit) * unit
    for start in range(rows.start // unit * unit, stop, step):
        read = range(start, min(start + step, stop))
        kept = range(max(read.start, rows.start), min(read.stop, rows.stop))
        yield _Piece(part.target[kept.start - rows.start : kept.stop - rows.start], read, kept)
