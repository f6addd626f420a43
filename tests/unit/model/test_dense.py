from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tknp.errors import InvalidValue
from tknp.model.checkpoint import open_checkpoint
from tknp.model.dense import Dense, TorchDense
from tknp.model.shard import Shard

MakeDense = Callable[..., TorchDense]


@pytest.fixture
def dense(random_checkpoint: Callable[..., Path]) -> MakeDense:
    def make(dtype: torch.dtype = torch.float32, tp: int = 1, rank: int = 0) -> TorchDense:
        checkpoint = open_checkpoint(random_checkpoint())
        shard = Shard(checkpoint.config, 0, 3, True, True, tp, rank)
        return TorchDense(checkpoint.load(shard, dtype))

    return make


@pytest.mark.parametrize("batch", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shapes_and_dtypes(dense: MakeDense, dtype: torch.dtype, batch: int) -> None:
    d: Dense = dense(dtype)
    shard = d.shard
    x = d.embed(torch.arange(batch))
    qkv = d.project(1, x)
    attention = qkv[:, : shard.q_width]
    assert (x.shape, x.dtype) == ((batch, 64), torch.float32)
    assert (qkv.shape, qkv.dtype) == ((batch, shard.qkv_width), dtype)
    for part in (d.output(1, attention), d.mlp(1, x)):
        assert (part.shape, part.dtype) == ((batch, 64), dtype)
    finished = d.finish(1, x, attention)
    assert (finished.shape, finished.dtype) == ((batch, 64), torch.float32)
    logits = d.head(finished)
    assert (logits.shape, logits.dtype) == ((batch, 261), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_finish_is_output_and_mlp_with_residuals(dense: MakeDense, dtype: torch.dtype) -> None:
    d = dense(dtype)
    x = d.embed(torch.arange(4))
    attention = d.project(0, x)[:, : d.shard.q_width]
    between = x + d.output(0, attention)
    expected = between + d.mlp(0, between)
    torch.testing.assert_close(d.finish(0, x.clone(), attention), expected, rtol=0, atol=0)


def test_embedding_slices_sum_exactly(dense: MakeDense) -> None:
    ids = torch.tensor([0, 65, 66, 131, 132, 197, 198, 260])
    whole = dense().embed(ids)
    slices = [dense(tp=4, rank=rank).embed(ids) for rank in range(4)]
    torch.testing.assert_close(torch.stack(slices).sum(0), whole, rtol=0, atol=0)
    assert [len(part.abs().sum(1).nonzero()) for part in slices] == [2, 2, 2, 2]


def test_a_rank_without_vocabulary_embeds_zero(random_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(random_checkpoint(vocab=4, q_heads=8, kv_heads=2, head_dim=8))
    shard = Shard(checkpoint.config, 0, 0, True, True, 8, 7)
    last = TorchDense(checkpoint.load(shard, torch.float32))
    x = last.embed(torch.arange(4))
    assert x.tolist() == [[0.0] * 64] * 4
    assert last.head(x).shape == (4, 0)


def test_finish_of_a_slice_is_refused(dense: MakeDense) -> None:
    d = dense(tp=2)
    with pytest.raises(InvalidValue, match="tp=2"):
        d.finish(0, torch.zeros(1, 64), torch.zeros(1, 32))


def test_operations_of_absent_parts_are_refused(random_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(random_checkpoint())
    shard = Shard(checkpoint.config, 0, 1, False, False)
    middle = TorchDense(checkpoint.load(shard, torch.float32))
    with pytest.raises(InvalidValue, match="embedding"):
        middle.embed(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InvalidValue, match="head"):
        middle.head(torch.zeros(1, 64))
