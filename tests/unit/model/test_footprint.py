from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tknp.errors import InvalidValue
from tknp.model.checkpoint import open_checkpoint
from tknp.model.config import ModelConfig
from tknp.model.footprint import footprint
from tknp.model.shard import Projected, Shard

LLAMA_405B = ModelConfig(
    vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248, layers=126, q_heads=128,
    kv_heads=8, head_dim=128, max_position=131_072,
)  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "nemotron"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_equals_the_bytes_that_loading_holds(
    random_checkpoint: Callable[..., Path], tied: bool, tp: int, family: str
) -> None:
    checkpoint = open_checkpoint(random_checkpoint(tied=tied, family=family))
    config = checkpoint.config
    expected = footprint(config, "bfloat16", tp)

    def held(start: int, stop: int, embedding: bool, head: bool) -> int:
        shard = Shard(config, start, stop, embedding, head, tp, 0)
        return checkpoint.load(shard, torch.bfloat16).size_bytes

    assert expected.layers == (held(1, 2, False, False),) * config.layers
    assert expected.embedding == held(0, 0, True, False)
    assert expected.total == held(0, config.layers, True, True)


@pytest.mark.parametrize("projected", ["attention", "dense"])
def test_dense_work_spread_over_nodes(
    random_checkpoint: Callable[..., Path], projected: Projected
) -> None:
    checkpoint = open_checkpoint(random_checkpoint(q_heads=6, kv_heads=3, head_dim=8))
    config = checkpoint.config
    expected = footprint(config, "bfloat16", 3, dense_tp=12, projected=projected)
    shard = Shard(config, 0, config.layers, True, True, 3, 0, 12, 0, projected)
    assert checkpoint.load(shard, torch.bfloat16).size_bytes == expected.total


def test_llama_405b_in_bf16_holds_its_parameters() -> None:
    assert footprint(LLAMA_405B, "bfloat16").total == 2 * 405_853_388_800


def test_recipes_mix_dtypes() -> None:
    fp8 = footprint(LLAMA_405B, "bfloat16", 8, {"mlp": 1.0, "edge_mlp": 2.0})
    bf16 = footprint(LLAMA_405B, "bfloat16", 8)
    mlp = 3 * 16_384 * 53_248 // 8
    assert fp8.layers[0] == fp8.layers[-1] == bf16.layers[0]
    assert set(fp8.layers[1:-1]) == {bf16.layers[1] - mlp}
    assert (fp8.embedding, fp8.head) == (bf16.embedding, bf16.head)
    assert footprint(LLAMA_405B, "bfloat16", 8, {"mlp": 1.0}).layers[0] == fp8.layers[1]


@pytest.mark.parametrize(("part", "size"), [("mlp", 0.0), ("gate", 1.0)])
def test_wrong_recipes_are_refused(part: str, size: float) -> None:
    with pytest.raises(InvalidValue, match=part):
        footprint(LLAMA_405B, "bfloat16", 1, {part: size})  # type: ignore[dict-item]
