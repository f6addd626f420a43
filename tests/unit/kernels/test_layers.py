"""KernelLayers: bitwise what the operations give one by one, close to their twins."""

import pytest
import torch

from tknp.attention.base import AttentionShape
from tknp.attention.reference import ReferenceAttention
from tknp.errors import InvalidValue
from tknp.kernels.decode import KernelDecodeAttention
from tknp.kernels.dense import KernelDense
from tknp.kernels.layers import KernelLayers
from tknp.layout.program import Kind, Op, Transfer
from tknp.layout.rank import Rank
from tknp.model.config import ModelConfig
from tknp.model.dense import TorchDense

pytestmark = pytest.mark.usefixtures("kernels")

CONFIG = ModelConfig(203, 96, 160, 3, 6, 2, 16, 2048)
SHAPE = AttentionShape(6, 2, 16, 64)
PARTS = (Kind.PROJECT, Kind.ATTEND, Kind.FINISH)
LENGTHS = [[300], [17, 0], [1, 513, 16, 255, 257, 33, 2], [40] * 50]


class Case:
    """One step on layers whose pages start alike."""

    def __init__(self, random_weights, requests, run_through) -> None:
        self.run_through = run_through
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

    def layers(self, pages, **options) -> KernelLayers:
        options = {"dense": [self.dense], "attention": self.attention, "max_rows": 50} | options
        return KernelLayers(self.dense.shard, pages=pages, **options)

    def stages(self, layer=0) -> list[Op]:
        return [Op(kind, 0, len(self.x), layer) for kind in PARTS]

    def run(self, whole, layers, x) -> tuple[torch.Tensor, list[float]]:
        prepared = whole.prepare(layers, self.stages())
        steps = whole.run(prepared, self.attention.plan(self.requests.rows), x)
        ran = self.run_through(steps)
        assert ran.sending is None
        assert ran.waits == [0.0] * len(ran.seconds)
        return ran.x, ran.seconds

    def together(self, pages, layers) -> tuple[torch.Tensor, list[float]]:
        return self.run(self.layers(pages), layers, self.x.clone())


@pytest.fixture
def case_of(random_weights, requests_of, run_through):
    return lambda lengths: Case(random_weights, requests_of(SHAPE, lengths), run_through)


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
        assert len(seconds) == len(PARTS) * len(every)
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


def test_a_run_is_used_again(case_of) -> None:
    case = case_of([70, 3])
    pages, expected_pages = case.pages(), case.pages()
    whole = case.layers(pages)
    prepared = whole.prepare(range(2), case.stages())
    for _ in range(2):
        expected = case.one_by_one(expected_pages, range(2))
        steps = whole.run(prepared, case.attention.plan(case.requests.rows), case.x.clone())
        assert torch.equal(case.run_through(steps).x, expected)


def test_what_does_not_fit(case_of, random_weights) -> None:
    case = case_of([70, 3])
    pages = case.pages()
    for layers in (range(2, 4), range(-1, 1)):
        with pytest.raises(InvalidValue, match="layers"):
            case.together(pages, layers)
    whole = case.layers(pages)
    for x in (case.x[:1], case.x.double()):
        with pytest.raises(InvalidValue, match="residual"):
            case.run(whole, range(1), x)
    prepared = whole.prepare(range(1), case.stages())
    for plan in (None, case.attention.plan(case.requests.only(slice(1)))):
        with pytest.raises(InvalidValue, match=r"plan\.rows"):
            next(whole.run(prepared, plan, case.x))
    with pytest.raises(InvalidValue, match="max_rows=1"):
        case.layers(pages, max_rows=1).prepare(range(1), case.stages())
    few = {0: tuple(t[:1] for t in pages[0])}
    with pytest.raises(InvalidValue, match="block_tables"):
        case.together(few, range(1))
    with pytest.raises(InvalidValue, match="k"):
        case.together({0: tuple(t.float() for t in pages[0])}, range(1))
    shared = KernelDense(random_weights(CONFIG, torch.bfloat16, tp=2))
    with pytest.raises(InvalidValue, match="dense_tp"):
        case.layers(pages, dense=[shared])


def test_what_is_taken(case_of) -> None:
    case = case_of([70, 3])
    pages = case.pages()
    del pages[1]
    whole = case.layers(pages)
    assert [whole.takes(op) for op in case.stages()] == [True] * 3
    assert [whole.takes(op) for op in case.stages(1)] == [True, False, True]
    assert [whole.takes(op) for op in case.stages(9)] == [False] * 3
    assert not whole.takes(Op(Kind.ATTEND, 0, 2, 0, partial=True))
    assert not whole.takes(Op(Kind.MLP, 0, 2, 0))
    moved = Transfer(Rank(0, 0), Rank(1, 0), 0, 1, 8, 2, "qkv")
    assert not whole.takes(Op(Kind.SCATTER, 0, 2, 0, sends=(moved,)))
    assert not any(map(case.layers(pages, dense=()).takes, case.stages()[::2]))
    assert not case.layers(pages, attention=None).takes(case.stages()[1])
