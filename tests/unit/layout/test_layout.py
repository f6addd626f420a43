"""Layouts: roles of nodes, what follows from them, and the refusal of impossible ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.rank import Rank
from tknp.layout.strategy import Strategy
from tknp.model.footprint import footprint

BOTH = NodeSpec(10**9)
ROOT_ONLY = NodeSpec(10**9, owner=False)
OWNER_ONLY = NodeSpec(10**9, root=False)


@settings(max_examples=40)
@given(data=st.data())
def test_roots_follow_blocks(data: st.DataObject, steps: Any) -> None:
    layout = data.draw(steps).layout
    assert len(layout.roots(0)) == layout.config.layers
    assert list(layout.roots(0)) == sorted(layout.roots(0))
    for layer, root in enumerate(layout.roots(0)):
        assert layer in layout.held[root][0].layers
    assert layout.first_root(0) == layout.roots(0)[0]
    tied = layout.config.tied_embeddings
    assert layout.sampler(0) == (layout.first_root(0) if tied else layout.roots(0)[-1])


@settings(max_examples=40)
@given(data=st.data())
def test_shards_of_a_pool_hold_every_weight_once(data: st.DataObject, steps: Any) -> None:
    layout = data.draw(steps).layout
    held = [shard for rank in layout.ranks() for shard in layout.shards(rank)]
    for layer in range(layout.config.layers):
        slices = [s for s in held if layer in s.layers]
        assert [s.tp_rank for s in slices] == list(range(layout.tp))
        heads = [head for s in slices for head in s.q_heads]
        assert heads == list(range(layout.config.q_heads))
    for shards in ([s for s in held if s.embedding], [s for s in held if s.head]):
        vocabulary = [i for s in shards for i in s.vocab]
        assert vocabulary == list(range(layout.config.vocab_size))


def test_attention_only_node_holds_no_weights(smollm2: Any) -> None:
    layout = make_layout(smollm2, "float32", 1, [OWNER_ONLY, BOTH, BOTH])
    assert layout.held[0] == layout.shards(Rank(0, 0)) == ()
    assert layout.weight_bytes(Rank(0, 0)) == 0
    assert layout.heads(Rank(0, 0)).qkv_width == layout.heads(Rank(1, 0)).qkv_width
    assert set(layout.roots(0)) == {1, 2}
    assert layout.first_root(0) == layout.sampler(0) == 1
    assert layout.owners == ((0, 1, 2),)


def test_root_only_node_owns_nothing(smollm2: Any) -> None:
    layout = make_layout(smollm2, "float32", 1, [ROOT_ONLY, OWNER_ONLY])
    assert layout.owners == ((1,),)
    assert set(layout.roots(0)) == {0}


def test_pool_of_one_node(smollm2: Any) -> None:
    layout = make_layout(smollm2, "float32", 3, [BOTH])
    assert layout.ranks() == (Rank(0, 0), Rank(0, 1), Rank(0, 2))
    assert layout.roots(0) == (0,) * 30
    assert layout.item_bytes == 4
    assert replace(layout, dtype="bfloat16").item_bytes == 2


@pytest.mark.parametrize(
    ("nodes", "remedy"),
    [
        ([], "at least one node must root layers"),
        ([OWNER_ONLY], "at least one node must root layers"),
        ([ROOT_ONLY], "at least one node must own requests"),
        ([BOTH] * 31, "give 1 to 30 root nodes"),
    ],
)
def test_impossible_pools_are_refused(nodes: list[NodeSpec], remedy: str, smollm2: Any) -> None:
    with pytest.raises(InvalidValue, match=remedy) as error:
        make_layout(smollm2, "float32", 1, nodes)
    assert (error.value.field, error.value.value) == ("nodes", len(nodes))


def test_more_nodes_than_layers_are_allowed_when_some_only_own(smollm2: Any) -> None:
    layout = make_layout(smollm2, "float32", 1, [BOTH] * 30 + [OWNER_ONLY])
    assert layout.roots(0) == tuple(range(30))


@pytest.mark.parametrize(("tp", "nearest"), [(2, 1), (4, 3), (0, 1)])
def test_illegal_tp_names_the_nearest_legal_degree(tp: int, nearest: int, smollm2: Any) -> None:
    with pytest.raises(InvalidValue, match=f"nearest is {nearest}$") as error:
        make_layout(smollm2, "float32", tp, [BOTH])
    assert error.value.field == "tp"


def test_digest_is_equal_exactly_where_layouts_are(smollm2: Any) -> None:
    def build(**changes: Any) -> Layout:
        return replace(make_layout(smollm2, "float32", 1, [BOTH, BOTH]), **changes)

    base = build()
    assert build().digest == base.digest
    ((first,), (second,)) = base.held
    others = [
        build(dtype="bfloat16"),
        build(tp=3),
        build(owners=((1,),)),
        build(strategy=Strategy.PP),
        build(width=1),
        build(interleave=8),
        build(overlap=2),
        build(domain_ranks=2),
        build(inside=True),
        build(routes=((0,) * 30,)),
        build(config=replace(smollm2, rope_theta=1.0)),
        build(held=((replace(first, stop=12),), (replace(second, start=12),))),
        build(held=((replace(first, head=False),), (replace(second, head=True),))),
    ]
    assert len({base.digest, *(other.digest for other in others)}) == 1 + len(others)


def test_layout_is_hashable_also_after_its_derived_values_were_read(smollm2: Any) -> None:
    one, two = (make_layout(smollm2, "float32", 1, [BOTH, BOTH]) for _ in range(2))
    assert one.digest
    assert one.heads(Rank(0, 0))
    assert one == two
    assert hash(one) == hash(two)


def test_ranks_of_a_layout_are_in_the_order_of_their_index(smollm2: Any) -> None:
    ranks = make_layout(smollm2, "float32", 3, [BOTH, BOTH]).ranks()
    assert [rank.index(3) for rank in ranks] == list(range(6))
    assert str(ranks[4]) == "(1, 1)"


def test_weights_of_a_pool_weigh_what_the_model_does(smollm2: Any) -> None:
    layout = make_layout(smollm2, "float32", 1, [BOTH] * 3)
    held = sum(layout.weight_bytes(rank) for rank in layout.ranks())
    assert held == footprint(smollm2, "float32").total
    recipe = {"mlp": 1.0}
    lighter = sum(layout.weight_bytes(rank, recipe) for rank in layout.ranks())
    assert lighter == footprint(smollm2, "float32", 1, recipe).total < held


@pytest.mark.parametrize("name", ["width", "interleave", "overlap"])
def test_numbers_below_one_are_refused(name: str, smollm2: Any) -> None:
    layout = make_layout(smollm2, "float32", 1, [BOTH])
    with pytest.raises(InvalidValue, match=f"{name}=0: must be at least 1"):
        replace(layout, **{name: 0})
