from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tknp.errors import InvalidValue
from tknp.model.config import LinearScaling, ModelConfig
from tknp.model.rope import apply_rope, loaded_order, rope_table

CONFIG = ModelConfig(
    vocab_size=8, hidden_size=16, intermediate_size=16, layers=1, q_heads=2, kv_heads=1,
    head_dim=8, max_position=128,
)  # fmt: skip


def test_pairs_rotate_by_position_times_frequency() -> None:
    cos, sin = rope_table(CONFIG, torch.tensor([0, 3]))
    heads = torch.zeros(2, 1, 8)
    heads[:, 0, 1] = 1.0  # first half of pair 1, whose frequency is 10000^(-2/8) = 0.1
    turned = apply_rope(heads, cos, sin)
    assert turned[0].tolist() == heads[0].tolist()
    assert turned[1, 0, 1].item() == pytest.approx(math.cos(0.3))
    assert turned[1, 0, 5].item() == pytest.approx(math.sin(0.3))


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(1))
    cos, sin = rope_table(CONFIG, torch.tensor([5, 2, 50, 47]))
    at = [apply_rope(x, cos[i : i + 1], sin[i : i + 1]) for i, x in enumerate([q, k, q, k])]
    near, far = (at[0] * at[1]).sum(), (at[2] * at[3]).sum()
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-5)


def test_factors_divide_frequencies() -> None:
    slow = dataclasses.replace(CONFIG, rope_factors=(2.0,) * 4)
    cos, _ = rope_table(slow, torch.tensor([6]))
    expected, _ = rope_table(CONFIG, torch.tensor([3]))
    torch.testing.assert_close(cos, expected)


@pytest.mark.parametrize("factors", [(1.0,), (1.0, 1.0, 1.0, 0.0)])
def test_wrong_factors_are_refused(factors: tuple[float, ...]) -> None:
    with pytest.raises(InvalidValue, match="rope_factors"):
        dataclasses.replace(CONFIG, rope_factors=factors)


def test_linear_scaling_stretches_every_pair() -> None:
    slow = dataclasses.replace(CONFIG, rope_scaling=LinearScaling(4.0))
    for found, expected in zip(
        rope_table(slow, torch.tensor([12])), rope_table(CONFIG, torch.tensor([3])), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("factor", [0.25, 0.5, 0.75])
def test_part_of_a_head_rotates_and_the_rest_stays(factor: float) -> None:
    """Heads as a checkpoint has them, rotated pair by pair, against their loaded order."""
    config = dataclasses.replace(CONFIG, partial_rotary_factor=factor)
    heads, position = torch.randn(1, 2, 8), 7
    expected, r = heads.clone(), config.rotary_dim
    for i in range(r // 2):
        angle = position * 10_000 ** (-2 * i / r)
        a, b = heads[..., i], heads[..., i + r // 2]
        expected[..., i] = a * math.cos(angle) - b * math.sin(angle)
        expected[..., i + r // 2] = b * math.cos(angle) + a * math.sin(angle)
    order = loaded_order(config)
    assert order is not None
    assert sorted(order.tolist()) == list(range(8))
    turned = apply_rope(heads[..., order], *rope_table(config, torch.tensor([position])))
    torch.testing.assert_close(turned, expected[..., order])
    rest = (order >= r).nonzero().flatten()
    assert torch.equal(turned[..., rest], heads[..., order][..., rest])
    assert loaded_order(CONFIG) is None


def test_dtype_is_kept_and_no_rows_are_fine() -> None:
    cos, sin = rope_table(CONFIG, torch.arange(0))
    turned = apply_rope(torch.zeros(0, 2, 8, dtype=torch.bfloat16), cos, sin)
    assert (turned.shape, turned.dtype) == ((0, 2, 8), torch.bfloat16)
