"""KernelDense against TorchDense in float32 on the same weights."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tknp.errors import InvalidValue
from tknp.kernels.dense import KernelDense
from tknp.model.config import ModelConfig
from tknp.model.dense import TorchDense

pytestmark = pytest.mark.usefixtures("kernels")

SMALL = ModelConfig(1003, 192, 256, 2, 6, 2, 32, 512, tied_embeddings=True)
ODD = ModelConfig(77, 37, 29, 1, 3, 1, 16, 512)  # no dimension fits a panel, odd inner sizes
SHAPES = pytest.mark.parametrize("config", [SMALL, ODD], ids=["small", "odd"])
SCALE = 3.0


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.01) -> None:
    """Within `tolerance` of the largest value: bfloat16 activations, float32 sums."""
    assert actual.shape == expected.shape
    difference = (actual.float() - expected).abs().max()
    assert difference <= tolerance * expected.abs().max()


@SHAPES
@pytest.mark.parametrize("rows", [1, 2, 7, 13, 67])
def test_operations_equal_the_twin(config, random_weights, rows) -> None:
    kernels = KernelDense(random_weights(config, torch.bfloat16))
    twin = TorchDense(random_weights(config, torch.float32))
    ids = torch.randint(config.vocab_size, (rows,))
    assert torch.equal(kernels.embed(ids), twin.embed(ids))
    x = torch.randn(rows, config.hidden_size) * SCALE
    attention = torch.randn(rows, config.q_width).to(torch.bfloat16)
    close(kernels.project(0, x), twin.project(0, x))
    close(kernels.output(0, attention), twin.output(0, attention.float()))
    close(kernels.mlp(0, x), twin.mlp(0, x))
    close(kernels.head(x), twin.head(x))
    for dense in (kernels, twin):
        parts = list(dense.head_parts(x))
        assert torch.equal(torch.cat(parts, dim=-1), dense.head(x))
    expected = twin.finish(0, x, attention.float())
    close(kernels.finish(0, x.clone(), attention), expected, 0.004)


@SHAPES
def test_no_rows(config, random_weights) -> None:
    dense = KernelDense(random_weights(config, torch.bfloat16))
    x = dense.embed(torch.empty(0, dtype=torch.int64))
    assert x.shape == (0, config.hidden_size)
    qkv = dense.project(0, x)
    assert qkv.shape == (0, dense.shard.qkv_width)
    x = dense.finish(0, x, qkv[:, : config.q_width])
    assert dense.head(x).shape == (0, config.vocab_size)


@SHAPES
def test_a_row_does_not_depend_on_its_batch_or_the_threads(config, random_weights, threads) -> None:
    dense = KernelDense(random_weights(config, torch.bfloat16))
    x = torch.randn(70, config.hidden_size) * SCALE
    attention = torch.randn(70, config.q_width).to(torch.bfloat16)

    def run(rows: slice) -> list[torch.Tensor]:
        mine = x[rows].clone()
        return [
            dense.project(0, mine),
            dense.output(0, attention[rows]),
            dense.mlp(0, mine),
            dense.head(mine),
            dense.finish(0, mine, attention[rows]),
        ]

    threads(2)
    whole = run(slice(None))
    threads(1)
    for cut in (slice(None), slice(0, 13), *(slice(i, i + 1) for i in range(13)), slice(40, 48)):
        for part, all_rows in zip(run(cut), whole, strict=True):
            assert torch.equal(part, all_rows[cut])


def test_rows_beyond_a_chunk(random_weights) -> None:
    # Chunks on AVX2 have 320 KiB (csrc/gemm.h): here 96 rows, or 30 of the widest.
    config = ModelConfig(50, 802, 2400, 1, 3, 1, 16, 512)
    dense = KernelDense(random_weights(config, torch.bfloat16))
    x = torch.randn(200, config.hidden_size)
    many = [dense.project(0, x), dense.mlp(0, x), dense.head(x)]
    for rows in (slice(0, 40), slice(180, 200)):
        few = [dense.project(0, x[rows]), dense.mlp(0, x[rows]), dense.head(x[rows])]
        assert all(torch.equal(f, m[rows]) for f, m in zip(few, many, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel_slices(random_weights, rank) -> None:
    config = ModelConfig(101, 64, 96, 1, 4, 2, 16, 512, tied_embeddings=True)
    kernels = KernelDense(random_weights(config, torch.bfloat16, tp=2, rank=rank))
    twin = TorchDense(random_weights(config, torch.float32, tp=2, rank=rank))
    ids = torch.arange(config.vocab_size)
    assert torch.equal(kernels.embed(ids), twin.embed(ids))
    x = torch.randn(9, config.hidden_size)
    close(kernels.mlp(0, x), twin.mlp(0, x))
    close(kernels.head(x), twin.head(x))
    with pytest.raises(InvalidValue, match="output"):
        kernels.finish(0, x, torch.zeros(9, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("projected", ["attention", "dense"])
def test_dense_work_spread_over_nodes(random_weights, projected) -> None:
    config = ModelConfig(101, 64, 96, 1, 4, 2, 16, 512)
    cut = {"tp": 2, "rank": 1, "dense_tp": 6, "dense_rank": 5, "projected": projected}
    kernels = KernelDense(random_weights(config, torch.bfloat16, **cut))
    twin = TorchDense(random_weights(config, torch.float32, **cut))
    x = torch.randn(9, config.hidden_size)
    attention = torch.randn(9, len(kernels.shard.output_columns)).to(torch.bfloat16)
    assert attention.shape[1] == 10  # the last of three parts of 32 columns
    close(kernels.project(0, x), twin.project(0, x))
    close(kernels.output(0, attention), twin.output(0, attention.float()))
    close(kernels.mlp(0, x), twin.mlp(0, x))
    assert torch.equal(kernels.embed(torch.arange(101)), twin.embed(torch.arange(101)))
    with pytest.raises(InvalidValue, match="dense_tp=6"):
        kernels.finish(0, x, attention)


def test_a_nan_stays_in_its_row(random_weights) -> None:
    dense = KernelDense(random_weights(SMALL, torch.bfloat16))
    x = torch.randn(5, SMALL.hidden_size)
    x[2, 7] = torch.nan
    mlp = dense.mlp(0, x)
    assert mlp[2].isnan().all()
    assert not mlp[[0, 1, 3, 4]].isnan().any()


def test_a_tied_matrix_is_stored_once(random_weights) -> None:
    weights = random_weights(SMALL, torch.bfloat16)
    padding = 1.1
    assert KernelDense(weights).size_bytes < padding * weights.size_bytes


def test_calls_from_several_threads(random_weights) -> None:
    dense = KernelDense(random_weights(SMALL, torch.bfloat16))
    inputs = [torch.randn(rows, SMALL.hidden_size) for rows in (3, 40, 1, 24)]
    expected = [dense.mlp(0, x) for x in inputs]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            actual = list(pool.map(lambda x: dense.mlp(0, x), inputs))
            assert all(map(torch.equal, actual, expected))


def test_refused_memory_is_an_error_with_numbers_and_harms_nothing(random_weights) -> None:
    dense = KernelDense(random_weights(SMALL, torch.bfloat16))
    x = torch.randn(3, SMALL.hidden_size)
    attention = torch.randn(3, SMALL.q_width).to(torch.bfloat16)
    expected = dense.finish(0, x.clone(), attention)
    columns = dense.shape.mlp_columns
    dense.shape.mlp_columns = 1 << 50  # three rows need more than any processor addresses
    untouched = x.clone()
    with pytest.raises(MemoryError, match=r"lower prefill_chunk .* or max_batch") as refused:
        dense.finish(0, untouched, attention)
    wanted = re.search(r"need (\d+) bytes \((.*) GiB\)", str(refused.value))
    assert wanted is not None
    least = 3 * 2 * (1 << 50)
    assert least <= int(wanted[1]) <= 3 * least
    assert float(wanted[2]) == pytest.approx(int(wanted[1]) / 2**30)
    assert torch.equal(untouched, x)
    dense.shape.mlp_columns = columns
    assert torch.equal(dense.finish(0, x, attention), expected)


def test_what_the_kernels_do_not_take(random_weights) -> None:
    nemotron = replace(SMALL, family="nemotron")
    with pytest.raises(InvalidValue, match=r"family='nemotron': .*RMSNorm"):
        KernelDense(random_weights(nemotron, torch.bfloat16))
    with pytest.raises(InvalidValue, match="bfloat16"):
        KernelDense(random_weights(SMALL, torch.float32))
    dense = KernelDense(random_weights(SMALL, torch.bfloat16))
    with pytest.raises(InvalidValue, match=r"float32 \[B, 192\]"):
        dense.project(0, torch.zeros(1, 191))
    with pytest.raises(InvalidValue, match="attention"):
        dense.finish(0, torch.zeros(1, 192), torch.zeros(1, 192))
