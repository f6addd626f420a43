"""KernelPrefillLayers: bitwise what the operations give one by one."""

import pytest
import torch

from tknp.attention.base import AttentionShape
from tknp.errors import InvalidValue
from tknp.kernels.dense import KernelDense
from tknp.kernels.prefill import PARTS, KernelPrefillAttention, KernelPrefillLayers
from tknp.model.config import ModelConfig

pytestmark = pytest.mark.usefixtures("kernels")

CONFIG = ModelConfig(203, 96, 160, 3, 6, 2, 16, 2048)
SHAPE = AttentionShape(6, 2, 16, 64)
START, COUNT = 70, 65


class Case:
    """One chunk on layers whose pages start alike."""

    def __init__(self, random_weights, requests) -> None:
        self.requests = requests
        self.table = requests.rows.block_tables[0]
        self.dense = KernelDense(random_weights(CONFIG, torch.bfloat16))
        self.attention = KernelPrefillAttention(SHAPE, requests.rope)
        self.x = torch.randn(COUNT, CONFIG.hidden_size)

    def pages(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {layer: self.requests.pages() for layer in range(CONFIG.layers)}

    def together(self, pages, calls, start=START) -> tuple[torch.Tensor, list[float]]:
        x = self.x.clone()
        through = KernelPrefillLayers(self.dense, self.attention, pages).chunk(x, start, self.table)
        return x, [second for layers in calls for second in through(layers)]


@pytest.fixture
def case(random_weights, requests_of) -> Case:
    return Case(random_weights, requests_of(SHAPE, [START + COUNT]))


@pytest.mark.parametrize("calls", [[range(3)], [range(1), range(1, 3)], [range(1, 3)]], ids=str)
def test_equal_to_the_operations_one_by_one(case, threads, calls) -> None:
    layers = [layer for some in calls for layer in some]
    threads(2)
    expected, expected_pages = case.x.clone(), case.pages()
    for layer in layers:
        qkv = case.dense.project(layer, expected)
        out = case.attention.attend(qkv, START, case.table, *expected_pages[layer])
        expected = case.dense.finish(layer, expected, out)
    for count in (1, 2, 3):
        threads(count)
        pages = {layer: pair for layer, pair in case.pages().items() if layer in layers}
        x, seconds = case.together(pages, calls)
        assert torch.equal(x, expected)
        assert len(seconds) == PARTS * len(layers)
        assert min(seconds) > 0
        for layer in layers:
            for found, wanted in zip(pages[layer], expected_pages[layer], strict=True):
                assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


def test_what_does_not_fit(case, random_weights) -> None:
    pages = case.pages()
    for layers in (range(2, 4), range(-1, 1)):
        with pytest.raises(InvalidValue, match="layers"):
            case.together(pages, [layers])
    with pytest.raises(InvalidValue, match="start=128"):
        case.together(pages, [range(1)], start=128)
    case.table[1] = len(pages[0][0])
    with pytest.raises(InvalidValue, match="block_table"):
        case.together(pages, [range(1)])
    case.x = case.x.double()
    with pytest.raises(InvalidValue, match="residual"):
        case.together(pages, [range(1)])
    with pytest.raises(InvalidValue, match="k"):
        case.together({0: tuple(t.float() for t in pages[0])}, [range(1)])
    shared = KernelDense(random_weights(CONFIG, torch.bfloat16, tp=2))
    with pytest.raises(InvalidValue, match="dense_tp"):
        KernelPrefillLayers(shared, case.attention, pages)
