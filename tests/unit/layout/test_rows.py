"""The order of a step's rows and the groups they form."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.rows import Group, arrange, check_groups
from tknp.layout.strategy import Strategy

few = settings(max_examples=50, deadline=None)


@st.composite
def draw_rows(draw: st.DrawFn) -> dict[int, tuple[tuple[int, ...], int]]:
    rows = {}
    for slot in draw(st.sets(st.integers(0, 50), max_size=8)):
        owners = tuple(draw(st.permutations(range(4)))[: draw(st.sampled_from([1, 1, 2, 3]))])
        rows[slot] = owners, draw(st.sampled_from(owners))
    return rows


def _layout(model: Any, strategy: Strategy = Strategy.TKNP, nodes: int = 4) -> Any:
    config = model(3, 4, 2, 1, 1, nodes)
    return make_layout(config, "float32", 1, [NodeSpec(10**6)] * nodes, strategy=strategy)


@few
@given(rows=draw_rows())
def test_rows_stand_narrow_before_wide_by_owner_and_then_by_slot(rows: Any, model: Any) -> None:
    order, groups = arrange(_layout(model), rows)
    assert sorted(order) == sorted(rows)
    start = 0
    for group in groups:
        slots = order[start : start + group.rows]
        assert list(slots) == sorted(slots)
        assert {rows[slot] for slot in slots} == {(group.owners, group.appender)}
        start += group.rows
    assert start == len(rows)
    assert [g.wide for g in groups] == sorted(g.wide for g in groups)
    narrow = [g.owners[0] for g in groups if not g.wide]
    assert narrow == sorted(set(narrow))
    wide = [(g.owners, g.appender) for g in groups if g.wide]
    assert wide == sorted(set(wide))
    check_groups(_layout(model), 0, groups)


@few
@given(rows=draw_rows(), seed=st.integers(0, 99))
def test_order_does_not_depend_on_the_order_of_admission(rows: Any, seed: int, model: Any) -> None:
    items = list(rows.items())
    random.Random(seed).shuffle(items)
    assert arrange(_layout(model), dict(items)) == arrange(_layout(model), rows)


def test_rows_form_one_group_where_the_layout_says_who_owns_what(model: Any) -> None:
    rows = {5: ((0, 1), 1), 2: ((0, 1), 0)}
    for strategy in (Strategy.PP, Strategy.DCP, Strategy.HELIX):
        layout = _layout(model, strategy, nodes=2)
        assert arrange(layout, rows) == ((2, 5), (Group((0, 1), 0, 2),))
    one = _layout(model, Strategy.TP, nodes=1)
    assert arrange(one, {3: ((0,), 0)}) == ((3,), (Group((0,), 0, 1),))


def test_no_rows_are_no_groups(model: Any) -> None:
    for strategy in (Strategy.TKNP, Strategy.HELIX):
        assert arrange(_layout(model, strategy, nodes=2), {}) == ((), ())
