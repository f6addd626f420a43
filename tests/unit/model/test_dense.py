from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tknp.errors import InvalidValue
from tknp.model.checkpoint import open_checkpoint
from tknp.model.dense import BlocksDense, Dense, TorchDense
from tknp.model.shard import Projected, Shard

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


@pytest.mark.parametrize("projected", ["attention", "dense"])
@pytest.mark.parametrize(("tp", "nodes"), [(1, 2), (1, 3), (2, 2), (3, 4)])
def test_ranks_of_all_nodes_sum_to_the_whole(
    random_checkpoint: Callable[..., Path], tp: int, nodes: int, projected: Projected
) -> None:
    """Columns cut heads where they don't divide: (3, 4) has 16 of a rank's over 4 nodes."""
    checkpoint = open_checkpoint(random_checkpoint(q_heads=6, kv_heads=3, head_dim=8))
    config = checkpoint.config
    whole = TorchDense(checkpoint.load(Shard(config, 0, 3, True, True), torch.float32))
    shards = [
        Shard(config, 0, 3, True, True, tp, t, nodes * tp, n * tp + t, projected)
        for n in range(nodes)
        for t in range(tp)
    ]
    ranks = [TorchDense(checkpoint.load(shard, torch.float32)) for shard in shards]
    ids = torch.arange(0, 260, 13)
    x = torch.randn(len(ids), config.hidden_size)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5)
    assert torch.equal(sum(rank.embed(ids) for rank in ranks), whole.embed(ids))
    close(torch.cat([rank.head(x) for rank in ranks], 1), whole.head(x))
    close(sum(rank.mlp(1, x) for rank in ranks), whole.mlp(1, x))

    attention = torch.randn(len(ids), config.q_width)
    slices = [attention[:, s.tp_rank * s.q_width :][:, span(s.output_columns)] for s in shards]
    parts = [rank.output(1, slice_) for rank, slice_ in zip(ranks, slices, strict=True)]
    close(sum(parts), whole.output(1, attention))

    q, k, v = whole.project(1, x).split([config.q_width, config.kv_width, config.kv_width], 1)
    for shard, rank in zip(shards, ranks, strict=True):
        t, kv = shard.tp_rank, shard.kv_columns
        expected = [
            q[:, t * shard.q_width :][:, span(shard.q_columns)],
            k[:, t * shard.kv_width :][:, span(kv)],
            v[:, t * shard.kv_width :][:, span(kv)],
        ]
        close(rank.project(1, x), torch.cat(expected, 1))


def span(columns: range) -> slice:
    return slice(columns.start, columns.stop)


def test_a_rank_of_several_blocks(random_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(random_checkpoint(layers=4))
    config = checkpoint.config
    cuts = [Shard(config, 3, 4, False, True), Shard(config, 0, 2, True, False)]
    dense: Dense = BlocksDense(
        cuts, [TorchDense(checkpoint.load(cut, torch.float32)) for cut in cuts]
    )
    whole = TorchDense(checkpoint.load(Shard(config, 0, 4, True, True), torch.float32))
    x = whole.embed(torch.arange(5))
    assert torch.equal(dense.embed(torch.arange(5)), x)
    for layer in (0, 1, 3):
        attention = whole.project(layer, x)[:, : config.q_width]
        assert torch.equal(dense.project(layer, x)[:, : config.q_width], attention)
        assert torch.equal(dense.output(layer, attention), whole.output(layer, attention))
        assert torch.equal(dense.mlp(layer, x), whole.mlp(layer, x))
        expected = whole.finish(layer, x, attention)
        assert torch.equal(dense.finish(layer, x, attention), expected)
    assert torch.equal(dense.head(x), whole.head(x))
    with pytest.raises(InvalidValue, match="layer 2"):
        dense.project(2, x)
    with pytest.raises(InvalidValue, match="once"):
        BlocksDense([cuts[0], cuts[0]], [whole, whole])


def test_finish_of_a_slice_is_refused(dense: MakeDense) -> None:
    d = dense(tp=2)
    with pytest.raises(InvalidValue, match="dense_tp=2"):
        d.finish(0, torch.zeros(1, 64), torch.zeros(1, 32))


def test_operations_of_absent_parts_are_refused(random_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(random_checkpoint())
    shard = Shard(checkpoint.config, 0, 1, False, False)
    middle = TorchDense(checkpoint.load(shard, torch.float32))
    with pytest.raises(InvalidValue, match="embedding"):
        middle.embed(torch.zeros(1, dtype=torch.int64))
    with pytest.raises(InvalidValue, match="head"):
        middle.head(torch.zeros(1, 64))
