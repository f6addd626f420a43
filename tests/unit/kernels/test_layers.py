"""KernelLayers: bitwise what the operations give one by one, close to their twins."""

import pytest
import torch

from tknp.attention.base import AttentionShape
from tknp.attention.reference import ReferenceAttention
from tknp.errors import InvalidValue
from tknp.kernels.decode import KernelDecodeAttention
from tknp.kernels.dense import KernelDense
from tknp.kernels.layers import PARTS, KernelLayers
from tknp.model.config import ModelConfig
from tknp.model.dense import TorchDense

pytestmark = pytest.mark.usefixtures("kernels")

CONFIG = ModelConfig(203, 96, 160, 3, 6, 2, 16, 2048)
SHAPE = AttentionShape(6, 2, 16, 64)
LENGTHS = [[300], [17, 0], [1, 513, 16, 255, 257, 33, 2], [40] * 50]


class Case:
    """One step on layers whose pages start alike."""

    def __init__(self, random_weights, requests) -> None:
        self.requests = requests
        self.weights = random_weights
        self.dense = KernelDense(random_weights(CONFIG, torch.bfloat16))
        self.attention = KernelDecodeAttention(SHAPE, requests.rope)
        self.x = torch.randn(requests.rows.rows, CONFIG.hidden_size)

    def pages(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {layer: self.requests.pages() for layer in range(CONFIG.layers)}

    def one_by_one(self, pages, layers) -> torch.Tensor:
        x, plan = self.x.clone(), self.attention.plan(self.requests.rows)
        for layer in layers:
            qkv = self.dense.project(layer, x)
            out, _ = self.attention.attend(plan, qkv, *pages[layer])
            x = self.dense.finish(layer, x, out)
        return x

    def together(self, pages, layers) -> tuple[torch.Tensor, list[float]]:
        whole = KernelLayers(self.dense, self.attention, pages)
        return whole.run(layers, self.attention.plan(self.requests.rows), self.x.clone())


@pytest.fixture
def case_of(random_weights, requests_of):
    return lambda lengths: Case(random_weights, requests_of(SHAPE, lengths))


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows")
def test_equal_to_the_operations_one_by_one(case_of, threads, lengths) -> None:
    case = case_of(lengths)
    every = range(CONFIG.layers)
    threads(2)
    expected_pages = case.pages()
    expected = case.one_by_one(expected_pages, every)
    for count in (1, 2, 3):
        threads(count)
        pages = case.pages()
        x, seconds = case.together(pages, every)
        assert torch.equal(x, expected)
        assert len(seconds) == PARTS * len(every)
        assert min(seconds) > 0
        for layer in every:
            for found, wanted in zip(pages[layer], expected_pages[layer], strict=True):
                assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


def test_some_of_the_layers(case_of) -> None:
    case = case_of([70, 3])
    pages, expected_pages = case.pages(), case.pages()
    expected = case.one_by_one(expected_pages, range(1, 3))
    del pages[0]
    x, _ = case.together(pages, range(1, 3))
    assert torch.equal(x, expected)


def test_close_to_the_twins(case_of) -> None:
    case = case_of([300, 1, 64])
    twin = TorchDense(case.weights(CONFIG, torch.float32))
    attention = ReferenceAttention(SHAPE, case.requests.rope)
    x = case.x.clone()
    for layer in range(CONFIG.layers):
        qkv = twin.project(layer, x).to(torch.bfloat16)
        out, _ = attention.attend(case.requests.rows, qkv, *case.requests.pages())
        x = twin.finish(layer, x, out.float())
    found, _ = case.together(case.pages(), range(CONFIG.layers))
    assert (found - x).abs().max() < 0.02 * x.abs().max()


def test_what_does_not_fit(case_of, random_weights) -> None:
    case = case_of([70, 3])
    pages = case.pages()
    for layers in (range(2, 4), range(-1, 1)):
        with pytest.raises(InvalidValue, match="layers"):
            case.together(pages, layers)
    whole = KernelLayers(case.dense, case.attention, pages)
    plan = case.attention.plan(case.requests.rows)
    with pytest.raises(InvalidValue, match="residual"):
        whole.run(range(1), plan, case.x[:1])
    with pytest.raises(InvalidValue, match="residual"):
        whole.run(range(1), plan, case.x.double())
    few = {0: tuple(t[:1] for t in pages[0])}
    with pytest.raises(InvalidValue, match="block_tables"):
        case.together(few, range(1))
    with pytest.raises(InvalidValue, match="k"):
        case.together({0: tuple(t.float() for t in pages[0])}, range(1))
    shared = KernelDense(random_weights(CONFIG, torch.bfloat16, tp=2))
    with pytest.raises(InvalidValue, match="dense_tp"):
        KernelLayers(shared, case.attention, pages)
