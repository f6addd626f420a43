from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tknp.attention.merge import merge, merge_columns, weighted

HEADS, HEAD_DIM = 3, 8
NAN, INF = float("nan"), float("inf")


def attend(scores: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """scores [R, H, n], values [R, H, n, dh] -> output and LSE; nothing to attend: 0 and -inf."""
    if scores.shape[-1] == 0:
        return values.new_zeros(*scores.shape[:2], HEAD_DIM), scores.new_full(
            scores.shape[:2], -torch.inf
        )
    return (scores.softmax(-1).unsqueeze(2) @ values).squeeze(2), scores.logsumexp(-1)


def problem(tokens: int, rows: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(tokens)
    scores = torch.randn(rows, HEADS, tokens, generator=random) * 20
    return scores, torch.randn(rows, HEADS, tokens, HEAD_DIM, generator=random)


@pytest.mark.parametrize("cuts", [[], [5], [0, 5, 5, 12], [3, 4, 13]])
def test_equals_attention_over_the_concatenation(cuts: list[int]) -> None:
    scores, values = problem(13)
    edges = [0, *cuts, 13]
    parts = [attend(scores[..., a:b], values[:, :, a:b]) for a, b in pairwise(edges)]
    out, lse = merge(torch.stack([o for o, _ in parts]), torch.stack([x for _, x in parts]))
    expected_out, expected_lse = attend(scores.double(), values.double())
    torch.testing.assert_close(out.double(), expected_out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("empty_lse", [-INF, INF, NAN])
@pytest.mark.parametrize("rubbish", [NAN, INF, 1e30])
def test_what_an_empty_part_left_in_its_output_is_dropped(empty_lse: float, rubbish: float) -> None:
    out, lse = attend(*problem(6))
    outs = torch.stack((torch.full_like(out, rubbish), out))
    lses = torch.stack((torch.full_like(lse, empty_lse), lse))
    merged_out, merged_lse = merge(outs, lses)
    assert torch.equal(merged_out, out)
    torch.testing.assert_close(merged_lse, lse, rtol=0, atol=1e-6)


def test_all_parts_empty() -> None:
    outs = torch.full((2, 4, HEADS, HEAD_DIM), NAN)
    out, lse = merge(outs, torch.full((2, 4, HEADS), -INF))
    assert not out.any()
    assert torch.equal(lse, torch.full((4, HEADS), -INF))


def test_no_parts_and_no_rows() -> None:
    out, lse = merge(torch.empty(0, 4, HEADS, HEAD_DIM), torch.empty(0, 4, HEADS))
    assert not out.any()
    assert torch.equal(lse, torch.full((4, HEADS), -INF))
    out, lse = merge(torch.empty(2, 0, HEADS, HEAD_DIM), torch.empty(2, 0, HEADS))
    assert out.shape == (0, HEADS, HEAD_DIM)
    assert lse.shape == (0, HEADS)


def test_rows_are_empty_independently() -> None:
    out, lse = attend(*problem(6))
    lses = torch.stack((lse, lse))
    lses[0, 1] = lses[:, 2] = -INF
    merged, merged_lse = merge(torch.stack((out, out)), lses)
    torch.testing.assert_close(merged[[0, 1, 3]], out[[0, 1, 3]])
    assert not merged[2].any()
    torch.testing.assert_close(merged_lse[0], lse[0] + torch.tensor(2.0).log())


def test_scores_far_apart_neither_overflow_nor_vanish() -> None:
    outs = torch.stack((torch.ones(1, 1, 2), torch.full((1, 1, 2), 5.0)))
    out, lse = merge(outs, torch.tensor([1e4, -1e4]).view(2, 1, 1))
    assert torch.equal(out, outs[0])
    assert lse.item() == 1e4


def test_sixteen_bit_parts_are_summed_in_float32() -> None:
    """In bfloat16 the sum would stop growing at 256: 256 + 1 = 256 there."""
    parts = 512
    outs = torch.ones(parts, 1, 1, 1, dtype=torch.bfloat16)
    out, lse = merge(outs, torch.zeros(parts, 1, 1))
    assert out.dtype == torch.bfloat16
    assert out.item() == 1.0
    assert lse.item() == pytest.approx(torch.tensor(512.0).log().item())


@pytest.mark.parametrize("columns", [range(24), range(8, 16), range(6, 19), range(3, 5), range(0)])
def test_columns_merge_as_the_whole_row_does(columns: range) -> None:
    scores, values = problem(13)
    parts = [attend(scores[..., a:b], values[:, :, a:b]) for a, b in ((0, 4), (4, 4), (4, 13))]
    whole, _ = merge(torch.stack([o for o, _ in parts]), torch.stack([x for _, x in parts]))
    heads = slice(columns.start // HEAD_DIM, -(-columns.stop // HEAD_DIM))
    here = slice(columns.start, columns.stop)
    merged = merge_columns(
        [o.flatten(1)[:, here] for o, _ in parts],
        [x[:, heads] for _, x in parts],
        columns,
        HEAD_DIM,
    )
    assert torch.equal(merged, whole.flatten(1)[:, here])


def test_weighted_parts_sum_to_the_merged_row() -> None:
    scores, values = problem(13)
    parts = [attend(scores[..., a:b], values[:, :, a:b]) for a, b in ((0, 4), (4, 4), (4, 13))]
    lses = [lse for _, lse in parts]
    total = sum(weighted(out.flatten(1), lses, i) for i, (out, _) in enumerate(parts))
    whole, _ = merge(torch.stack([o for o, _ in parts]), torch.stack(lses))
    torch.testing.assert_close(total, whole.flatten(1), rtol=1e-5, atol=1e-6)


def test_weights_of_parts_that_are_all_empty_are_zero() -> None:
    empty = torch.full((2, HEADS), -torch.inf)
    assert not weighted(torch.zeros(2, HEADS * HEAD_DIM), [empty, empty], 1).any()
