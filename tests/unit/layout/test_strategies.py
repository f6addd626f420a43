"""Logical grids, who holds and owns what on them, and the refusal of what can't be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tknp.errors import InvalidValue
from tknp.layout.layout import Layout, NodeSpec, lay_out, make_layout
from tknp.layout.rank import Rank
from tknp.layout.strategies import RULES, Grid, grid
from tknp.layout.strategy import Strategy

BOTH, ROOT_ONLY, OWNER_ONLY = (
    NodeSpec(10**10),
    NodeSpec(10**10, owner=False),
    NodeSpec(10**10, root=False),
)


def _on(config: Any, strategy: Strategy, **asked: Any) -> Layout:
    chosen = grid(config, strategy, **asked)
    return lay_out(config, "bfloat16", chosen, chosen.specs(80 * 10**9))


@pytest.mark.parametrize(
    ("strategy", "asked", "expected"),
    [
        ("tknp", {}, Grid(Strategy.TKNP, 4, 8, 1, 1, 4, domain_ranks=8)),
        ("tknp", {"width": 2}, Grid(Strategy.TKNP, 4, 8, 1, 1, 2, domain_ranks=8)),
        ("tknp", {"copies": 2}, Grid(Strategy.TKNP, 4, 8, 2, 2, 4, domain_ranks=8)),
        ("tknp", {"microbatches": 4}, Grid(Strategy.TKNP, 4, 8, 1, 4, 4, domain_ranks=8)),
        ("dp", {"copies": 1}, Grid(Strategy.DP, 4, 8, 1, 4, domain_ranks=8)),
        ("tp", {}, Grid(Strategy.TP, 1, 32, domain_ranks=8)),
        ("pp", {}, Grid(Strategy.PP, 4, 8, 1, 4, domain_ranks=8)),
        ("pp", {"microbatches": 1}, Grid(Strategy.PP, 4, 8, domain_ranks=8)),
        ("dcp", {}, Grid(Strategy.DCP, 4, 8, width=4, domain_ranks=8)),
        (
            "dcp", {"kvp": 8, "inside": True},
            Grid(Strategy.DCP, 8, 4, width=8, domain_ranks=8, inside=True),
        ),
        (
            "helix", {"kvp": 16, "overlap": 8},
            Grid(Strategy.HELIX, 16, 2, width=16, overlap=8, domain_ranks=8),
        ),
    ],
    ids=str,
)  # fmt: skip
def test_grids_of_four_machines_of_eight(
    strategy: str, asked: dict[str, Any], expected: Grid, llama_405b: Any
) -> None:
    assert grid(llama_405b, Strategy(strategy), nodes=4, tp=8, **asked) == expected


@pytest.mark.parametrize("strategy", ["helix", "dcp"])
def test_sequence_shards_are_more_where_machines_exceed_the_kv_heads(
    strategy: str, llama_405b: Any
) -> None:
    """TPA stays at most Hkv: 16 ranks a machine become 2 shards of 8 each."""
    chosen = grid(llama_405b, Strategy(strategy), nodes=2, tp=16)
    assert (chosen.nodes, chosen.tp, chosen.domain_ranks) == (4, 8, 16)


@pytest.mark.parametrize(
    ("strategy", "asked", "field", "remedy"),
    [
        ("tknp", {"nodes": 3, "copies": 2}, "copies", "odd number, have none; use 2 or 4 of them"),
        ("tknp", {"nodes": 1, "copies": 2}, "copies", "use 2 of them, or 1 copy"),
        ("tknp", {"copies": 3}, "copies", "keep 1 copy of the weights, or 2"),
        ("tknp", {"copies": 2, "microbatches": 4}, "microbatches", "nearest is 2"),
        ("tknp", {"nodes": 8, "microbatches": 3}, "microbatches", "divide 8 .* nearest is 2"),
        ("tknp", {"width": 5}, "width", "1 to 4 owners here, one a node; nearest is 4"),
        ("tknp", {"tp": 3}, "tp", "must divide 128 query heads.* nearest is 2"),
        ("tknp", {"nodes": 127}, "nodes", "1 to 126 root nodes"),
        ("tknp", {"kvp": 2}, "kvp", "tknp has no kvp: leave it out, or use dcp, helix"),
        ("tknp", {"overlap": 2}, "overlap", "tknp has no overlap: leave it out, or use helix"),
        ("tknp", {"nodes": 0}, "nodes", "must be at least 1"),
        ("tknp", {"tp": 0}, "tp", "must be at least 1"),
        ("tknp", {"width": 0}, "width", "must be at least 1"),
        ("dp", {"microbatches": 2}, "microbatches", "dp has no microbatches: .* or use tknp, pp"),
        ("dp", {"inside": True}, "inside", "dp has no inside: leave it out, or use dcp, helix"),
        ("tp", {"nodes": 3}, "nodes", "all 24 ranks, which must divide .* nearest is 2 nodes"),
        ("pp", {"nodes": 130}, "nodes", "1 to 126 root nodes"),
        ("pp", {"width": 2}, "width", "pp has no width: leave it out, or use tknp"),
        ("helix", {"kvp": 2}, "kvp", "divide 8 KV heads.*; nearest is 4"),
        ("helix", {"kvp": 3}, "kvp", "divide 8 KV heads.*; nearest is 4"),
        ("helix", {"nodes": 3}, "nodes", "all ranks must divide 53248 .*; nearest is 2 nodes"),
        ("dcp", {"kvp": 32, "inside": True}, "inside", "don't divide the 8 ranks.* is kvp 8"),
        ("dcp", {"copies": 2}, "copies", "dcp has no copies: leave it out, or use tknp"),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_combinations_name_reason_and_nearest_choice(
    strategy: str, asked: dict[str, Any], field: str, remedy: str, llama_405b: Any
) -> None:
    with pytest.raises(InvalidValue, match=remedy) as error:
        grid(llama_405b, Strategy(strategy), **{"nodes": 4, "tp": 8, **asked})
    assert error.value.field == field
    assert error.value.value == {"nodes": 4, "tp": 8, **asked}[field]


def test_no_legal_number_of_nodes_is_said(model: Any) -> None:
    config = model(1, 2, 1, 3, 1, 1)  # one MLP column: nothing divides it
    with pytest.raises(InvalidValue, match="no number of nodes is legal"):
        grid(config, Strategy.TP, nodes=2, tp=2)
    with pytest.raises(InvalidValue, match="no number of nodes is legal"):
        grid(config, Strategy.HELIX, nodes=2, tp=2)


def test_dual_roots_on_eight_nodes(llama_405b: Any) -> None:
    """Two blocks a node; block b on nodes b and (b + 4) mod 8; never one root for both streams."""
    layout = _on(llama_405b, Strategy.TKNP, nodes=8, tp=8, copies=2)
    assert [len(blocks) for blocks in layout.held] == [2] * 8
    first, second = layout.routes
    assert all(one != other for one, other in zip(first, second, strict=True))
    blocks = [blocks[0] for blocks in layout.held]
    for b, block in enumerate(blocks):
        assert {first[layer] for layer in block.layers} == {b}
        assert {second[layer] for layer in block.layers} == {(b + 4) % 8}
        assert layout.held[(b + 4) % 8][1] == block
    assert layout.owners == (tuple(range(8)),) * 2
    assert (layout.first_root(0), layout.first_root(1)) == (0, 4)
    assert (layout.sampler(0), layout.sampler(1)) == (7, 3)
    held = [layout.weight_bytes(Rank(n, 0)) for n in range(8)]
    single = _on(llama_405b, Strategy.TKNP, nodes=8, tp=8)
    assert sum(held) == 2 * sum(single.weight_bytes(Rank(n, 0)) for n in range(8))
    assert max(held) - min(held) < single.weight_bytes(Rank(1, 0)) / 16  # under one layer


def test_offset_microbatches_keep_one_copy_and_one_route(smollm2: Any) -> None:
    """The first block samples where embeddings are tied, so that its time holds fewer layers."""
    layout = _on(smollm2, Strategy.TKNP, nodes=3, tp=1, microbatches=3)
    assert [len(blocks) for blocks in layout.held] == [1] * 3
    assert len(set(layout.routes)) == 1
    assert (layout.streams, len(layout.owners)) == (3, 3)
    sizes = [len(block.layers) for (block,) in layout.held]
    assert sum(sizes) == 30
    assert sizes[0] < sizes[1] <= sizes[2] <= sizes[1] + 1


def test_replicas_hold_everything_and_share_nothing(smollm2: Any) -> None:
    layout = _on(smollm2, Strategy.DP, nodes=3, tp=1)
    for s in range(3):
        assert layout.members(s) == layout.owners[s] == (s,)
        assert set(layout.routes[s]) == {layout.first_root(s)} == {layout.sampler(s)} == {s}
        (shard,) = layout.shards(Rank(s, 0))
        assert (shard.layers, shard.embedding, shard.head) == (range(30), True, True)


def test_pipeline_keeps_kv_where_the_layers_are(smollm2: Any) -> None:
    layout = _on(smollm2, Strategy.PP, nodes=3, tp=1, microbatches=2)
    kept = [layer for n in range(3) for layer in layout.kv_layers(Rank(n, 0))]
    assert kept == list(range(30))
    assert layout.owners == ((0, 1, 2),) * 2
    assert layout.divides == "layers"
    assert all(
        layout.kv_layers(Rank(n, 0)) == block.layers for n, (block,) in enumerate(layout.held)
    )


def test_tensor_parallelism_beyond_kv_heads_keeps_a_head_on_several_ranks(llama_405b: Any) -> None:
    layout = _on(llama_405b, Strategy.TP, nodes=4, tp=8)
    assert (layout.nodes, layout.tp, layout.divides) == (1, 32, "heads")
    kept = Counter(head for rank in layout.ranks() for head in layout.kv_heads(rank))
    assert kept == dict.fromkeys(range(8), 4)
    assert [layout.domain(Rank(0, t)) for t in (0, 7, 8, 31)] == [0, 0, 1, 3]


@pytest.mark.parametrize("strategy", [Strategy.DCP, Strategy.HELIX])
def test_sequence_shards_keep_all_layers_and_no_head_twice(
    strategy: Strategy, llama_405b: Any
) -> None:
    layout = _on(llama_405b, strategy, nodes=4, tp=8)
    assert (layout.spread, layout.divides, layout.dense_tp) == (True, "tokens", 32)
    for rank in layout.ranks():
        assert layout.kv_layers(rank) == range(126)
        assert list(layout.kv_heads(rank)) == [rank.t]
    columns = [c for rank in layout.ranks() for s in layout.shards(rank) for c in s.mlp_columns]
    assert sorted(columns) == list(range(53_248))


def test_groups_stand_across_machines_or_inside_them(llama_405b: Any) -> None:
    across = _on(llama_405b, Strategy.DCP, nodes=4, tp=8)
    inside = _on(llama_405b, Strategy.DCP, nodes=4, tp=8, inside=True)
    for t in range(8):
        group = [Rank(n, t) for n in range(4)]
        assert [across.domain(rank) for rank in group] == [0, 1, 2, 3]
        assert {inside.domain(rank) for rank in group} == {t // 2}


def test_root_only_and_attention_only_nodes_are_for_tknp_alone(smollm2: Any) -> None:
    nodes = [ROOT_ONLY, OWNER_ONLY, ROOT_ONLY, OWNER_ONLY]
    layout = make_layout(smollm2, "float32", 1, nodes, copies=2)
    assert [len(blocks) for blocks in layout.held] == [2, 0, 2, 0]
    assert layout.kv_nodes == (1, 3)
    assert layout.kv_layers(Rank(0, 0)) == range(0)
    assert layout.width == 2
    for strategy in set(Strategy) - {Strategy.TKNP}:
        with pytest.raises(InvalidValue, match="only tknp separates the two") as error:
            make_layout(smollm2, "float32", 1, nodes, strategy=strategy)
        assert error.value.field == "nodes[0].role"


def test_logical_grids_of_pool_files_are_checked_too(smollm2: Any) -> None:
    with pytest.raises(InvalidValue, match="one logical node"):
        make_layout(smollm2, "float32", 1, [BOTH] * 2, strategy=Strategy.TP)
    with pytest.raises(InvalidValue, match="nearest is 2 nodes of 3 ranks"):
        make_layout(smollm2, "float32", 2, [BOTH] * 3, strategy=Strategy.HELIX)
    with pytest.raises(InvalidValue, match="dp has no copies"):
        make_layout(smollm2, "float32", 1, [BOTH] * 2, strategy=Strategy.DP, copies=2)


def test_every_strategy_has_its_rules() -> None:
    assert set(RULES) == set(Strategy)
