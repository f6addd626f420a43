"""Bytes that each strategy puts on the wire, by its formula.

s is the size of a model element, 4 that of the residual stream and of LSE; W is the width of a QKV
row of a rank, Q that of its query heads, H their number. A step has B rows and L layers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind, Transfer, sent_bytes
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy

ENDS = (Kind.SAMPLE, Kind.FEEDBACK)
few = settings(max_examples=50, deadline=None)


def _sent(step: Any, *kinds: Kind) -> Iterable[Transfer]:
    return (t for _, op in step.kinds(*kinds) for t in op.sends)


def _bytes(step: Any, *kinds: Kind) -> int:
    return sum(t.nbytes for t in _sent(step, *kinds))


def _handoffs(step: Any) -> int:
    roots = step.layout.roots(step.stream)
    receivers = [*roots[1:], step.layout.sampler(step.stream)]
    changes = sum(a != b for a, b in zip(roots, receivers, strict=True))
    return changes * step.layout.tp * step.batch * step.layout.config.hidden_size * 4


def _root_exchange(step: Any) -> int:
    """s (W + Q) for each row that the root does not own, and for each further owner of a row.

    An owner that does not append gets s Q instead of s W; parts bring their LSE, 4 H.
    """
    layout, total = step.layout, 0
    heads = layout.heads(Rank(0, 0))
    s, q, h = layout.item_bytes, heads.q_width, len(heads.q_heads)
    for root in layout.roots(step.stream):
        for group in step.groups:
            for owner in set(group.owners) - {root}:
                there = s * (heads.qkv_width if owner == group.appender else q)
                back = s * q + 4 * h * group.wide
                total += group.rows * (there + back) * layout.tp
    return total


def _sequence_exchange(step: Any) -> int:
    """N T (N - 1) B times what a rank sends another one a layer.

    helix: its columns of the output, s Q / N, and LSE of the heads they belong to. dcp: projected
    columns, s W / N; LSE of all heads, 4 H; columns of the output, s Q / N.
    """
    layout = step.layout
    nodes, total = layout.nodes, 0
    for src in layout.ranks():
        for dst in (Rank(n, src.t) for n in range(nodes) if n != src.node):
            heads, columns = layout.heads(src), layout.heads(dst).output_columns
            assert len(columns) * nodes == heads.q_width
            if layout.strategy is Strategy.DCP:
                assert heads.projected_width * nodes == heads.qkv_width
                total += layout.item_bytes * heads.projected_width + 4 * len(heads.q_heads)
            else:
                total += 4 * len({column // layout.config.head_dim for column in columns})
            total += layout.item_bytes * len(columns)
    return total * step.batch * layout.config.layers


@few
@given(data=st.data())
def test_layers_move_what_the_formula_of_the_strategy_says(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    formula = {
        Strategy.PP: lambda: _handoffs(step),
        Strategy.DP: lambda: 0,
        Strategy.TP: lambda: 0,
        Strategy.DCP: lambda: _sequence_exchange(step),
        Strategy.HELIX: lambda: _sequence_exchange(step),
    }
    kinds = set(Kind) - set(ENDS)
    expected = formula.get(  # otherwise as tknp, which has a root a layer
        step.layout.strategy, lambda: _root_exchange(step) + _handoffs(step)
    )
    assert _bytes(step, *kinds) == expected()


@few
@given(data=st.data())
def test_ends_move_logits_to_one_rank_and_ids_to_all_that_embed(
    data: st.DataObject, any_steps: Any
) -> None:
    """4 B (V - V of the sampling rank), and 8 B a rank that embeds but does not sample."""
    step = data.draw(any_steps)
    layout, stream, rows = step.layout, step.stream, step.batch
    drawer = Rank(layout.sampler(stream), 0)
    other = layout.config.vocab_size - len(layout.heads(drawer).vocab)
    assert _bytes(step, Kind.SAMPLE) == 4 * rows * other
    readers = [r for r in layout.ranks() if layout.embeds(stream, r) and r != drawer]
    assert _bytes(step, Kind.FEEDBACK) == 8 * rows * len(readers)


@few
@given(data=st.data())
def test_all_reduces_take_two_operands_a_layer(data: st.DataObject, any_steps: Any) -> None:
    step = data.draw(any_steps)
    layout = step.layout
    operand = step.batch * layout.config.hidden_size
    for rank, program in step.programs.items():
        dense = any(op.kind is Kind.PROJECT for op in program)
        layers = len({op.layer for op in program if op.kind is Kind.PROJECT})
        reduced = sum(op.operand_bytes for op in program)
        embeds = layout.embeds(step.stream, rank) and dense
        expected = operand * (2 * layout.item_bytes * layers + 4 * embeds)
        assert reduced == (expected if layout.dense_tp > 1 else 0)


def test_helix_ships_the_share_of_the_hidden_state_that_its_paper_says(
    group_step: Any, llama_405b: Any
) -> None:
    """hx.comm: B H / (KVP TPA) elements to each peer, whatever the sequence length."""
    layout = make_layout(
        llama_405b, "bfloat16", 8, [NodeSpec(0)] * 8, strategy=Strategy.HELIX, domain_ranks=64
    )
    one_layer = replace(layout, config=replace(llama_405b, layers=1))
    step = group_step(one_layer, (Group(tuple(range(8)), 0, 8),))
    outputs = {t.shape[0] * t.width for t in _sent(step, Kind.EXCHANGE) if t.what == "attention"}
    assert outputs == {8 * 16_384 // (8 * 8)}
    assert sent_bytes(step.programs[Rank(3, 2)], cross_node=True) == 0  # one NVLink domain


@pytest.mark.parametrize("strategy", [Strategy.DCP, Strategy.HELIX])
def test_groups_inside_a_domain_keep_the_exchange_off_the_network(
    strategy: Strategy, model: Any, group_step: Any
) -> None:
    config = model(3, 2, 4, 1, 4, 8)
    step = {}
    for inside in (False, True):
        layout = make_layout(
            config, "float32", 4, [NodeSpec(0)] * 2, strategy=strategy, domain_ranks=4,
            inside=inside,
        )  # fmt: skip
        step[inside] = group_step(layout, (Group((0, 1), 0, 3),))
    kinds = set(Kind) - set(ENDS)
    assert all(t.crosses_nodes for t in _sent(step[False], *kinds))
    assert not any(t.crosses_nodes for t in _sent(step[True], *kinds))
    assert _bytes(step[True], *kinds) == _bytes(step[False], *kinds) > 0
