"""Usable KV of every strategy against data parallelism: facts cap.* (Figure 5)."""

from __future__ import annotations

from typing import Any

import pytest

from tknp.errors import InvalidValue
from tknp.planner.hardware import GIB

PUBLISHED = {1: 1.0, 2: 3.3, 4: 4.4, 8: 5.0}


@pytest.mark.parametrize("nodes", PUBLISHED)
@pytest.mark.parametrize("strategy", ["tknp", "pp", "dcp"])
def test_capacity_is_the_published_multiple_of_dp(
    strategy: str, nodes: int, explained: Any
) -> None:
    """cap.ratio_2n, cap.ratio_4n, cap.ratio_8n, with 582 GiB a pool node against 560."""
    assert explained(strategy, nodes).ratio_to_dp() == pytest.approx(PUBLISHED[nodes], rel=0.02)


def test_without_the_fitted_budget_eight_nodes_have_4_75(explained: Any) -> None:
    assert explained("tknp", 8).ratio_to_dp(fitted=False) == pytest.approx(4.75, rel=0.005)


def test_a_pipeline_fills_its_budgets_but_for_whole_layers(explained: Any) -> None:
    """126 layers on 8 nodes: those with 16 of them are full first."""
    pipeline, pool = explained("pp", 8), explained("tknp", 8)
    assert pipeline.ratio_to_dp() == pytest.approx(pool.ratio_to_dp(), rel=1e-3)
    assert 0.95 < pipeline.ratio_to_dp(tokens=True) / pool.ratio_to_dp(tokens=True) < 0.995


def test_a_node_of_dp_keeps_106_gib_for_kv(explained: Any) -> None:
    """cap.kv_budget."""
    (room, *_) = explained("dp", 2).capacity.nodes
    assert room.budget_bytes * 8 / GIB == pytest.approx(106, rel=0.005)


def test_tensor_parallelism_keeps_heads_several_times(explained: Any) -> None:
    """Beyond Hkv = 8 ranks, usable KV shrinks with every machine that is added."""
    ratios = [explained("tp", nodes).ratio_to_dp() for nodes in (1, 2, 4, 8)]
    assert ratios[0] == 1.0
    assert ratios[1] > ratios[2] > 1 > ratios[3]


def test_two_copies_cost_a_second_copy(explained: Any) -> None:
    one, two = (explained("tknp", 8, copies=copies).capacity for copies in (1, 2))
    weights = sum(node.weight_bytes for node in one.nodes)
    assert sum(node.weight_bytes for node in two.nodes) == 2 * weights
    assert one.kv_bytes - two.kv_bytes == weights * 8


def test_what_does_not_fit_is_refused(explained: Any) -> None:
    with pytest.raises(InvalidValue, match="take more nodes"):
        explained("tknp", 1, tp=2)
