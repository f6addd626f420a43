"""Random shards and requests. What needs the kernels is skipped where there are none.

Tests that use `kernels` run on those of this processor and, marked `full`, on those for AVX-512
with its instructions emulated (avx512/immintrin.h); `emulated_kernels` has the latter only.
"""

import hashlib
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeRows, RopeTable
from tknp.errors import Unavailable
from tknp.kernels.build import SOURCES, build, find_compiler, user_cache
from tknp.kernels.isa import AVX2, Isa, cpu_features
from tknp.kernels.layers import Ran
from tknp.kernels.library import Library, available, load
from tknp.model.config import ModelConfig
from tknp.model.shard import Shard
from tknp.model.weights import LayerWeights, ShardWeights
from tknp.transport.base import Work

EMULATION = Path(__file__).parent / "avx512"


@pytest.fixture(scope="session")
def emulated_isa() -> Isa:
    """How to compile the code for AVX-512 so that it runs with AVX2."""
    try:
        find_compiler()
    except Unavailable as error:
        pytest.skip(str(error))
    if not AVX2.needs <= cpu_features():
        pytest.skip("the emulation of AVX-512 needs a processor with AVX2 and FMA")
    digest = hashlib.sha256((EMULATION / "immintrin.h").read_bytes())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    flags = (
        "-march=x86-64-v3",
        "-Og",  # compiles in a third of the time
        "-fno-gnu-unique",  # shares nothing with the library for this processor
        "-DTKNP_AVX512_BF16",
        f"-DTKNP_EMULATION={digest.hexdigest()[:16]}",  # compiles anew when it changes
        f"-I{EMULATION}",
        f"-I{SOURCES}",
    )
    return Isa("avx512_bf16", AVX2.needs, flags)


@pytest.fixture(scope="session")
def emulated_library(emulated_isa: Isa) -> Library:
    return Library(str(build(emulated_isa, user_cache() / "emulated")), emulated_isa)


@pytest.fixture
def emulated_kernels(emulated_library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """What loads kernels during a test gets these instead of those of this processor."""
    for name, module in list(sys.modules.items()):
        if name.startswith("tknp.kernels.") and getattr(module, "load", None) is load:
            monkeypatch.setattr(module, "load", lambda: emulated_library)


# An emulated instruction takes some hundred times as long.
EMULATED = pytest.param("avx512", marks=[pytest.mark.full, pytest.mark.timeout(900)])


@pytest.fixture(params=["native", EMULATED])
def kernels(request: pytest.FixtureRequest) -> None:
    if request.param == "avx512":
        return request.getfixturevalue("emulated_kernels")
    status = available()
    if not status:
        pytest.skip(status.reason)
    return None


@pytest.fixture
def run_through() -> Callable[[Generator[Work, None, Ran]], Ran]:
    """What a run of layers gives that waits for nobody else."""

    def run(steps: Generator[Work, None, Ran]) -> Ran:
        try:
            while True:
                next(steps).wait()
        except StopIteration as end:
            ran: Ran = end.value
            return ran

    return run


@pytest.fixture
def random_weights() -> Callable[..., ShardWeights]:
    """Weights of one rank, the same values in any dtype."""

    def make(
        config: ModelConfig, dtype: torch.dtype, tp: int = 1, rank: int = 0, **cut: Any
    ) -> ShardWeights:
        shard = Shard(config, 0, config.layers, True, True, tp, rank, **cut)
        generator = torch.Generator().manual_seed(rank)

        def random(*shape: int) -> Tensor:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return values.to(torch.bfloat16).to(dtype)

        d, f = config.hidden_size, len(shard.mlp_columns)
        layers = {
            layer: LayerWeights(
                input_norm=random(d) + 1,
                qkv=random(shard.projected_width, d),
                output=random(d, len(shard.output_columns)),
                mlp_norm=random(d) + 1,
                gate_up=random(2 * f, d),
                down=random(d, f),
            )
            for layer in shard.layers
        }
        rounded = {
            layer: LayerWeights(*(t.to(torch.bfloat16).to(dtype) for t in weights.tensors))
            for layer, weights in layers.items()
        }
        embedding = random(len(shard.vocab), d)
        head = embedding if config.tied_embeddings else random(len(shard.vocab), d)
        return ShardWeights(shard, rounded, embedding, torch.ones(d, dtype=dtype), head)

    return make


@dataclass
class Requests:
    """Rows of a step over a pool whose unused slots and pages are NaN."""

    shape: AttentionShape
    rope: RopeTable
    rows: DecodeRows
    qkv: Tensor
    k: Tensor
    v: Tensor

    def pages(self) -> tuple[Tensor, Tensor]:
        """A fresh copy of the pool, to be appended to."""
        return self.k.clone(), self.v.clone()

    def only(self, rows: slice) -> DecodeRows:
        r = self.rows
        return DecodeRows(r.block_tables[rows], r.positions[rows], r.lengths[rows], r.append[rows])


@pytest.fixture
def requests_of() -> Callable[..., Requests]:
    """Requests of given lengths; every third doesn't append, nor does one of length 0."""

    def make(shape: AttentionShape, lengths: list[int], max_position: int = 2048) -> Requests:
        generator = torch.Generator().manual_seed(len(lengths))
        count, size = len(lengths), shape.page_size
        width = -(-max(lengths) // size)
        pages = count * width + 3
        order = 1 + torch.randperm(pages - 1, generator=generator).int()
        tables = order[: count * width].view(count, width)
        append = torch.tensor([n > 0 and i % 3 != 2 for i, n in enumerate(lengths)])

        pool_shape = (pages, shape.kv_heads, size, shape.head_dim)
        k = torch.full(pool_shape, torch.nan, dtype=torch.bfloat16)
        v = k.clone()
        for row, length in enumerate(lengths):
            for first in range(0, length - int(append[row]), size):
                stop = min(first + size, length - int(append[row]))
                for pool in (k, v):
                    filled = pool[tables[row, first // size], :, : stop - first]
                    filled.copy_(torch.randn(filled.shape, generator=generator))
        lengths_ = torch.tensor(lengths, dtype=torch.int32)
        positions = (lengths_ - 1).clamp(min=0)
        rows = DecodeRows(tables, positions, lengths_, append)
        qkv = torch.randn(count, shape.qkv_width, generator=generator).to(torch.bfloat16)
        half = torch.arange(0, shape.head_dim, 2) / shape.head_dim
        angles = torch.arange(max_position)[:, None] / 10_000**half
        return Requests(shape, (angles.cos(), angles.sin()), rows, qkv * 2, k, v)

    return make
