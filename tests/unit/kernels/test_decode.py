"""KernelDecodeAttention against brute force in float64; unused pages and slots hold NaN."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tknp.attention.base import AttentionShape, DecodeRows
from tknp.attention.reference import ReferenceAttention
from tknp.errors import InvalidValue
from tknp.kernels.decode import KernelDecodeAttention

pytestmark = pytest.mark.usefixtures("kernels")

LENGTHS = [1, 0, 17, 300, 513, 16, 255, 256, 257, 33, 100, 2, 64]
SMALL = AttentionShape(9, 3, 64, 64)
SHAPES = [
    AttentionShape(1, 1, 16, 16),
    AttentionShape(4, 1, 32, 48),
    SMALL,
    AttentionShape(5, 1, 64, 256),
    AttentionShape(16, 2, 80, 16),
    AttentionShape(12, 2, 96, 64),
    AttentionShape(12, 1, 128, 32),
    AttentionShape(6, 6, 192, 64),
    AttentionShape(16, 1, 256, 16),
]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_brute_force(shape, requests_of) -> None:
    requests = requests_of(shape, [1, 0, 17, 300, 31])
    kernels, brute_force = (
        backend(shape, requests.rope) for backend in (KernelDecodeAttention, ReferenceAttention)
    )
    k, v = requests.pages()
    out, lse = kernels.attend(kernels.plan(requests.rows), requests.qkv, k, v)
    k2, v2 = requests.pages()
    expected, expected_lse = brute_force.attend(requests.rows, requests.qkv, k2, v2)
    assert same(k, k2)
    assert same(v, v2)
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=8e-3)
    torch.testing.assert_close(lse, expected_lse, atol=1e-5, rtol=1e-5)
    assert out[1].eq(0).all()
    assert lse[1].eq(-torch.inf).all()


def test_a_row_does_not_depend_on_its_batch_or_the_threads(requests_of, threads) -> None:
    requests = requests_of(SMALL, LENGTHS)
    kernels = KernelDecodeAttention(SMALL, requests.rope)

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        plan = kernels.plan(requests.only(rows))
        return kernels.attend(plan, requests.qkv[rows], *requests.pages())

    threads(2)
    out, lse = run(slice(None))
    threads(1)
    for cut in (slice(None), slice(3, 8), *(slice(i, i + 1) for i in range(len(LENGTHS)))):
        part, part_lse = run(cut)
        assert torch.equal(part, out[cut])
        assert torch.equal(part_lse, lse[cut])


def test_a_row_does_not_depend_on_the_page_size(requests_of) -> None:
    results = []
    for page_size in (16, 48, 512):
        shape = AttentionShape(6, 2, 80, page_size)
        requests = requests_of(shape, [500])
        torch.manual_seed(0)
        tokens = torch.randn(2, 500, 2, 80).to(torch.bfloat16)
        qkv = torch.randn(1, shape.qkv_width).to(torch.bfloat16)
        k, v = requests.pages()
        for token in range(500):
            page, slot = requests.rows.block_tables[0, token // page_size], token % page_size
            k[page, :, slot], v[page, :, slot] = tokens[:, token]
        kernels = KernelDecodeAttention(shape, requests.rope)
        results.append(kernels.attend(kernels.plan(requests.rows), qkv, k, v))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_a_prompt_as_rows_equals_its_tokens_one_by_one(requests_of) -> None:
    """Rows of growing length over the same pages: a replay that is exact to the last bit."""
    count, start = 40, 250
    requests = requests_of(SMALL, [start + count])
    table = requests.rows.block_tables
    kernels = KernelDecodeAttention(SMALL, requests.rope)
    qkv = torch.randn(count, SMALL.qkv_width).to(torch.bfloat16)

    def step(first: int, stop: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(start + first + 1, start + stop + 1, dtype=torch.int32)
        appends = torch.ones(stop - first, dtype=torch.bool)
        tables = table.expand(stop - first, -1)
        plan = kernels.plan(DecodeRows(tables, lengths - 1, lengths, appends))
        return kernels.attend(plan, qkv[first:stop], k, v)[0]

    together, one_by_one = requests.pages(), requests.pages()
    out = step(0, count, *together)
    parts = [step(i, i + 1, *one_by_one) for i in range(count)]
    assert torch.equal(out, torch.cat(parts))
    assert all(map(same, together, one_by_one))


def test_no_rows(requests_of) -> None:
    requests = requests_of(SMALL, [5])
    kernels = KernelDecodeAttention(SMALL, requests.rope)
    nothing = slice(0, 0)
    plan = kernels.plan(requests.only(nothing))
    out, lse = kernels.attend(plan, requests.qkv[nothing], *requests.pages())
    assert out.shape == (0, SMALL.q_width)
    assert lse.shape == (0, SMALL.q_heads)


def test_calls_from_several_threads(requests_of) -> None:
    shapes = [SMALL, AttentionShape(8, 2, 128, 16)]
    work = []
    for shape in shapes:
        requests = requests_of(shape, [300, 4, 77])
        kernels = KernelDecodeAttention(shape, requests.rope)
        work.append((kernels, kernels.plan(requests.rows), requests.qkv, *requests.pages()))
    expected = [kernels.attend(*arguments) for kernels, *arguments in work]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            actual = pool.map(lambda item: item[0].attend(*item[1:]), work)
            for (out, lse), (expected_out, expected_lse) in zip(actual, expected, strict=True):
                assert torch.equal(out, expected_out)
                assert torch.equal(lse, expected_lse)


def test_what_the_kernels_do_not_take(requests_of) -> None:
    requests = requests_of(SMALL, [70])
    kernels = KernelDecodeAttention(SMALL, requests.rope)
    with pytest.raises(InvalidValue, match="multiple of 16"):
        KernelDecodeAttention(AttentionShape(9, 3, 64, 24), requests.rope)
    with pytest.raises(InvalidValue, match="head_dim=48"):
        KernelDecodeAttention(AttentionShape(9, 3, 48, 16), requests.rope)
    k, v = requests.pages()
    requests.rows.block_tables[0, 1] = len(k)
    with pytest.raises(InvalidValue, match="block_tables"):
        kernels.attend(kernels.plan(requests.rows), requests.qkv, k, v)
    requests.rows.block_tables[0, 1] = -1
    with pytest.raises(InvalidValue, match="page ids"):
        kernels.plan(requests.rows)
    requests.rows.block_tables[0, 1] = 1
    with pytest.raises(InvalidValue, match="bfloat16"):
        kernels.attend(kernels.plan(requests.rows), requests.qkv.float(), k.float(), v.float())
