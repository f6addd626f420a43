"""A whole small model on the kernels for AVX-512, their instructions emulated, against torch.

No size is a multiple of 32, what one instruction multiplies; heads of 80 end in half a slice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.attention.prefill import PrefillAttention
from tknp.attention.reference import ReferenceAttention
from tknp.attention.torch_cpu import TorchCpuAttention
from tknp.kernels.decode import KernelDecodeAttention
from tknp.kernels.dense import KernelDense
from tknp.kernels.layers import KernelLayers, Ran
from tknp.kernels.prefill import KernelPrefillAttention
from tknp.kv.storage import KvStorage
from tknp.layout.program import Kind, Op
from tknp.model.config import ModelConfig
from tknp.model.dense import TorchDense
from tknp.model.rope import rope_table

pytestmark = pytest.mark.usefixtures("emulated_kernels")

CONFIG = ModelConfig(131, 144, 200, 2, 6, 2, 80, 128)
SHAPES = [  # heads of whole and of half slices, tiles of one to four heads
    AttentionShape(3, 1, 16, 16),
    AttentionShape(7, 1, 64, 64),
    AttentionShape(5, 1, 80, 16),
    AttentionShape(6, 3, 96, 48),
    AttentionShape(9, 1, 128, 16),
    AttentionShape(2, 2, 192, 64),
]
PAGE_TOKENS = 16
TABLES = torch.tensor([[5, 2, 7], [1, 8, 3]], dtype=torch.int32)
PROMPTS, STEPS = (37, 20), 5
IDS = torch.randint(CONFIG.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))


@dataclass
class Model:
    """One of two implementations, with its pages."""

    dense: Any
    prefill: Any
    decode: Any
    kv: KvStorage
    run_through: Callable[..., Ran]

    def prompt(self, request: int) -> Tensor:
        """Logits of a prompt, computed in two chunks."""
        count = PROMPTS[request]
        logits = []
        for start, stop in ((0, 11), (11, count)):
            x = self.dense.embed(IDS[request, start:stop])
            for layer in range(CONFIG.layers):
                qkv = self.dense.project(layer, x).to(self.kv.data.dtype)
                pages = self.kv.layer(layer)
                out = self.prefill.attend(qkv, start, TABLES[request], *pages)
                x = self.dense.finish(layer, x, out)
            logits.append(self.dense.head(x))
        return torch.cat(logits)

    def step(self, requests: list[int], number: int) -> Tensor:
        """Logits of one token of each of `requests`."""
        positions = torch.tensor([PROMPTS[r] + number for r in requests], dtype=torch.int32)
        appends = torch.ones(len(requests), dtype=torch.bool)
        plan = self.decode.plan(DecodeRows(TABLES[requests], positions, positions + 1, appends))
        x = self.dense.embed(IDS[requests, positions.long()])
        pages = {layer: self.kv.layer(layer) for layer in range(CONFIG.layers)}
        if isinstance(self.dense, KernelDense):
            whole = KernelLayers(
                self.dense.shard, [self.dense], self.decode, pages, max_rows=len(x)
            )
            stages = [Op(kind, 0, len(x), 0) for kind in (Kind.PROJECT, Kind.ATTEND, Kind.FINISH)]
            run = whole.run(whole.prepare(range(CONFIG.layers), stages), plan, x)
            return self.dense.head(self.run_through(run).x)
        for layer in range(CONFIG.layers):
            qkv = self.dense.project(layer, x).to(self.kv.data.dtype)
            x = self.dense.finish(layer, x, self.decode.attend(plan, qkv, *pages[layer])[0])
        return self.dense.head(x)


@pytest.fixture
def models(random_weights, run_through):
    def make(dtype, dense, prefill, decode) -> Model:
        weights = random_weights(CONFIG, dtype)
        shape = AttentionShape.of(weights.shard, PAGE_TOKENS)
        rope = rope_table(CONFIG, torch.arange(CONFIG.max_position))
        kv = KvStorage(CONFIG.layers, 9, shape.kv_heads, PAGE_TOKENS, shape.head_dim, dtype)
        return Model(dense(weights), prefill(shape, rope), decode(shape, rope), kv, run_through)

    kernels = (KernelDense, KernelPrefillAttention, KernelDecodeAttention)
    twins = (TorchDense, PrefillAttention, TorchCpuAttention)
    return lambda: make(torch.bfloat16, *kernels), lambda: make(torch.float32, *twins)


@torch.inference_mode()
def test_logits_of_prefill_and_decode(models) -> None:
    results = []
    for make in models:
        model = make()
        logits = [model.prompt(request) for request in (0, 1)]
        logits += [model.step([0, 1], number) for number in range(STEPS)]
        results.append(torch.cat(logits))
    found, expected = results
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_brute_force(shape, requests_of) -> None:
    """Decode of rows of growing length over one request's pages, and the same as a prefill."""
    start, count = 60, 9
    requests = requests_of(shape, [start + count])
    table = requests.rows.block_tables[0]
    qkv = torch.randn(count, shape.qkv_width).to(torch.bfloat16)
    lengths = torch.arange(start + 1, start + count + 1, dtype=torch.int32)
    appends = torch.ones(count, dtype=torch.bool)
    rows = DecodeRows(table.expand(count, -1), lengths - 1, lengths, appends)
    oracle, decode = (
        backend(shape, requests.rope) for backend in (ReferenceAttention, KernelDecodeAttention)
    )
    expected, expected_lse = oracle.attend(rows, qkv, *requests.pages())
    out, lse = decode.attend(decode.plan(rows), qkv, *requests.pages())
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=8e-3)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    prefill = KernelPrefillAttention(shape, requests.rope)
    out = prefill.attend(qkv, start, table, *requests.pages())
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1.6e-2)


@torch.inference_mode()
def test_logits_do_not_depend_on_the_batch_or_the_threads(models, threads) -> None:
    together, alone = models[0](), models[0]()
    for model, count in ((together, 2), (alone, 1)):
        threads(count)
        prompts = [model.prompt(request) for request in (0, 1)]
        if model is together:
            expected = prompts
    assert all(map(torch.equal, prompts, expected))
    for number in range(STEPS):
        threads(2)
        both = together.step([0, 1], number)
        threads(1)
        for request in (0, 1):
            assert torch.equal(alone.step([request], number)[0], both[request])
