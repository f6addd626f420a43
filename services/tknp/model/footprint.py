"""Bytes of weights by layer: what a layout needs to cut layer blocks. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tknp.errors import InvalidValue
from tknp.model.config import ITEM_BYTES, DType, ModelConfig
from tknp.model.shard import (
    Projected,
    Shard,
    attention_parameters,
    mlp_parameters,
    norm_parameters,
)

Part = Literal["attention", "mlp", "edge_mlp", "norm", "embedding", "head"]


@dataclass(frozen=True)
class Footprint:
    """Bytes on TP rank 0, the fullest of a node, of each layer, the embedding and the head.

    `head` is the final norm plus the LM head; tied, the norm alone, because the node that holds
    the embedding runs the head with the same matrix.
    """

    layers: tuple[int, ...]
    embedding: int
    head: int

    @property
    def total(self) -> int:
        return sum(self.layers) + self.embedding + self.head


def footprint(
    config: ModelConfig,
    dtype: DType,
    tp: int = 1,
    bytes_per_parameter: Mapping[Part, float] | None = None,
    *,
    dense_tp: int = 0,
    projected: Projected = "attention",
) -> Footprint:
    """Footprint of `config` cut over `tp` ranks, dense work over `dense_tp` of them (see `Shard`).

    `bytes_per_parameter` overrides the dtype's size by part, for recipes that mix dtypes (FP8 is
    1.0, a quantization with scales may be fractional). `edge_mlp` is the MLP of the first and the
    last layer, which FP8 recipes often keep in BF16; it defaults to `mlp`.
    """
    given = dict(bytes_per_parameter or {})
    for part, size in given.items():
        if part not in get_args(Part):
            raise InvalidValue("bytes_per_parameter", part, f"name one of {get_args(Part)}")
        if size <= 0:
            raise InvalidValue(f"bytes_per_parameter[{part}]", size, "must be above 0")
    item = float(ITEM_BYTES[dtype])
    mlp_item = given.get("mlp", item)
    norm_item = given.get("norm", item)

    shard = Shard(config, 0, 1, False, False, tp, 0, dense_tp, 0, projected)
    attention = attention_parameters(shard) * given.get("attention", item)
    mlp = mlp_parameters(shard)
    norm = norm_parameters(config)
    matrix = config.hidden_size * len(shard.vocab)

    def layer(index: int) -> int:
        edge = index in (0, config.layers - 1)
        mlp_bytes = mlp * (given.get("edge_mlp", mlp_item) if edge else mlp_item)
        return math.ceil(attention + mlp_bytes + 2 * norm * norm_item)

    lm_head = 0.0 if config.tied_embeddings else matrix * given.get("head", item)
    return Footprint(
        layers=tuple(layer(index) for index in range(config.layers)),
        embedding=math.ceil(matrix * given.get("embedding", item)),
        head=math.ceil(norm * norm_item + lm_head),
    )
