"""Properties of programs: who sends what to whom, in which order, and nothing else."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.layout.derive import derive as derive_groups
from tknp.layout.program import Kind, Op, Transfer, sent_bytes
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.tknp import derive

MOVES = (Kind.SCATTER, Kind.GATHER, Kind.HANDOFF, Kind.SAMPLE, Kind.FEEDBACK)
few = settings(max_examples=50)
DENSE = (Kind.PROJECT, Kind.FINISH, Kind.OUTPUT, Kind.MLP)


@few
@given(data=st.data())
def test_every_send_has_one_receive_of_equal_shape_bytes_and_rows(
    data: st.DataObject, steps: Any
) -> None:
    step = data.draw(steps)
    sent: Counter[tuple[Kind, int, Transfer]] = Counter()
    received: Counter[tuple[Kind, int, Transfer]] = Counter()
    for rank, op in step.kinds(*Kind):
        assert all(t.src == rank for t in op.sends)
        assert all(t.dst == rank for t in op.recvs)
        sent.update((op.kind, op.layer, t) for t in op.sends)
        received.update((op.kind, op.layer, t) for t in op.recvs)
    assert sent == received
    assert set(sent.values()) <= {1}


@few
@given(data=st.data())
def test_each_pair_of_ranks_agrees_on_the_order_of_its_transfers(
    data: st.DataObject, steps: Any
) -> None:
    step = data.draw(steps)
    order: dict[tuple[Rank, frozenset[Rank]], list[Transfer]] = defaultdict(list)
    for rank, op in step.kinds(*Kind):
        for t in (*op.sends, *op.recvs):
            order[rank, frozenset((t.src, t.dst))].append(t)
    for (rank, pair), transfers in order.items():
        (peer,) = pair - {rank}
        assert order[peer, pair] == transfers


@few
@given(data=st.data())
def test_transfers_stay_inside_their_operation_and_between_equal_ranks(
    data: st.DataObject, steps: Any
) -> None:
    step = data.draw(steps)
    for rank, op in step.kinds(*Kind):
        assert 0 <= op.start < op.stop <= step.batch
        assert op.kind in MOVES or not (op.sends or op.recvs)
        for t in (*op.sends, *op.recvs):
            assert t.src != t.dst
            assert op.start <= t.start < t.stop <= op.stop
            assert t.shape == (t.stop - t.start, t.width)
            assert t.nbytes == t.shape[0] * t.shape[1] * t.item_bytes > 0
            assert t.crosses_nodes is (t.src.node != t.dst.node)
            if op.kind in (Kind.SCATTER, Kind.GATHER, Kind.HANDOFF):
                assert t.crosses_nodes
                assert t.src.t == t.dst.t == rank.t


@few
@given(data=st.data())
def test_rows_are_attended_once_a_layer_by_their_owner(data: st.DataObject, steps: Any) -> None:
    step = data.draw(steps)
    found = Counter((rank, op.layer, op.start, op.stop) for rank, op in step.kinds(Kind.ATTEND))
    expected = Counter(
        (rank, layer, *step.spans[rank.node])
        for rank in step.layout.ranks()
        for layer in range(step.layout.config.layers)
        if step.rows[rank.node]
    )
    assert found == expected


@few
@given(data=st.data())
def test_dense_work_covers_the_batch_once_at_the_root(data: st.DataObject, steps: Any) -> None:
    step = data.draw(steps)
    layout = step.layout
    found = Counter((rank, op.kind, op.layer) for rank, op in step.kinds(*DENSE))
    kinds = (Kind.PROJECT, Kind.FINISH) if layout.tp == 1 else (Kind.PROJECT, Kind.OUTPUT, Kind.MLP)
    expected = Counter(
        (Rank(root, t), kind, layer)
        for layer, root in enumerate(layout.roots(0))
        for t in range(layout.tp)
        for kind in kinds
    )
    assert found == (expected if step.batch else Counter())
    for _, op in step.kinds(*DENSE, Kind.EMBED, Kind.HANDOFF, Kind.SAMPLE, Kind.FEEDBACK):
        assert (op.start, op.stop) == (0, step.batch)


@few
@given(data=st.data())
def test_endpoints_run_once_on_their_node(data: st.DataObject, steps: Any) -> None:
    step = data.draw(steps)
    layout = step.layout
    for kind, node in ((Kind.EMBED, layout.first_root(0)), (Kind.SAMPLE, layout.sampler(0))):
        where = sorted(rank for rank, _ in step.kinds(kind))
        assert where == ([Rank(node, t) for t in range(layout.tp)] if step.batch else [])


@few
@given(data=st.data())
def test_residual_stream_is_handed_over_only_where_the_root_changes(
    data: st.DataObject, steps: Any
) -> None:
    step = data.draw(steps)
    layout = step.layout
    receivers = [*layout.roots(0)[1:], layout.sampler(0)]
    expected = {
        (layer, Rank(src, t), Rank(dst, t))
        for layer, (src, dst) in enumerate(zip(layout.roots(0), receivers, strict=True))
        for t in range(layout.tp)
        if src != dst and step.batch
    }
    found = {(op.layer, t.src, t.dst) for _, op in step.kinds(Kind.HANDOFF) for t in op.sends}
    assert found == expected
    if not layout.config.tied_embeddings:
        assert layout.config.layers - 1 not in {layer for layer, _, _ in found}


@few
@given(data=st.data())
def test_ids_return_to_every_rank_of_the_first_root(data: st.DataObject, steps: Any) -> None:
    step = data.draw(steps)
    layout, drawer = step.layout, Rank(step.layout.sampler(0), 0)
    found = {t.dst for _, op in step.kinds(Kind.FEEDBACK) for t in op.recvs}
    readers = {Rank(layout.first_root(0), t) for t in range(layout.tp)} - {drawer}
    assert found == (readers if step.batch else set())
    assert {r for r, op in step.kinds(Kind.FEEDBACK) if op.sends} <= {drawer}


@few
@given(data=st.data())
def test_all_reduces_follow_partial_sums_on_every_rank_of_a_node(
    data: st.DataObject, steps: Any
) -> None:
    step = data.draw(steps)
    layout = step.layout
    partial = (Kind.EMBED, Kind.OUTPUT, Kind.MLP)
    for rank, program in step.programs.items():
        for op, after in pairwise((*program, None)):
            reduces = after is not None and after.kind is Kind.ALL_REDUCE
            assert reduces is (op.kind in partial and layout.tp > 1)
        first = step.programs[Rank(rank.node, 0)]
        assert _reduces(program) == _reduces(first)


def _reduces(program: tuple[Op, ...]) -> list[Op]:
    return [op for op in program if op.kind is Kind.ALL_REDUCE]


@few
@given(data=st.data())
def test_programs_of_equal_arguments_are_equal(data: st.DataObject, steps: Any) -> None:
    """Also on another process, which derives them from a layout of its own."""
    step = data.draw(steps)
    held = tuple(tuple(replace(block) for block in blocks) for blocks in step.layout.held)
    twin = replace(step.layout, held=held)
    assert twin is not step.layout
    for rank in step.layout.ranks():
        assert derive(twin, list(step.rows), rank) == step.programs[rank]


def test_no_context_length_enters_a_program() -> None:
    parameters = list(inspect.signature(derive_groups).parameters)
    assert parameters == ["layout", "stream", "groups", "rank"]
    assert Group._fields == ("owners", "appender", "rows")


@few
@given(data=st.data(), length=st.integers(1, 2**20))
def test_programs_do_not_depend_on_the_context_length_of_the_model(
    data: st.DataObject, length: int, steps: Any
) -> None:
    step = data.draw(steps)
    longer = replace(step.layout, config=replace(step.layout.config, max_position=length))
    for rank in step.layout.ranks():
        assert derive(longer, step.rows, rank) == step.programs[rank]


@few
@given(data=st.data())
def test_sent_bytes_split_by_the_reach_of_a_transfer(data: st.DataObject, steps: Any) -> None:
    step = data.draw(steps)
    for program in step.programs.values():
        sends = [t for op in program for t in op.sends]
        across = sent_bytes(program, cross_node=True)
        assert across == sum(t.nbytes for t in sends if t.src.node != t.dst.node)
        assert across + sent_bytes(program, cross_node=False) == sum(t.nbytes for t in sends)


def test_step_without_rows_is_empty(two_nodes: Any) -> None:
    assert derive(two_nodes, (0, 0), Rank(0, 0)) == ()


def test_node_without_rows_takes_no_part_in_attention(two_nodes: Any) -> None:
    kinds = [op.kind for op in derive(two_nodes, (0, 4), Rank(0, 0)) if op.layer == 0]
    assert kinds == [Kind.PROJECT, Kind.SCATTER, Kind.GATHER, Kind.FINISH]
    kinds = [op.kind for op in derive(two_nodes, (4, 0), Rank(0, 0)) if op.layer == 0]
    assert kinds == [Kind.PROJECT, Kind.ATTEND, Kind.FINISH]
    assert all(op.layer >= 2 for op in derive(two_nodes, (4, 0), Rank(1, 0))[1:-2])


def test_program_of_one_layer_reads_as_the_design_has_it(two_nodes: Any) -> None:
    root = [op.kind.value for op in derive(two_nodes, (2, 3), Rank(0, 0)) if op.layer == 0]
    owner = [op.kind.value for op in derive(two_nodes, (2, 3), Rank(1, 0)) if op.layer == 0]
    assert root == ["project", "scatter", "attend", "gather", "finish"]
    assert owner == ["scatter", "attend", "gather"]


@pytest.mark.parametrize(
    "groups",
    [
        [Group((0,), 0, 1)],
        [Group((1, 2), 2, 1)],
        [Group((1,), 1, 0)],
        [Group((1,), 0, 1)],
        [Group((), 0, 1)],
        [Group((2,), 2, 1), Group((1,), 1, 1)],
        [Group((1, 3), 1, 1), Group((1,), 1, 1)],
        [Group((1,), 1, 1), Group((1,), 1, 1)],
        [Group((1, 1), 1, 1)],
    ],
    ids=[
        "at a node that owns nothing", "at an unknown node", "no rows", "appender owns nothing",
        "no owner", "owners out of order", "wide before narrow", "one group in two", "owner twice",
    ],
)  # fmt: skip
def test_groups_that_the_layout_cannot_have_are_refused(groups: Any, two_nodes: Any) -> None:
    layout = replace(two_nodes, held=(*two_nodes.held, (), ()), owners=((1, 3),))
    with pytest.raises(InvalidValue, match=r"^groups=") as error:
        derive_groups(layout, 0, groups, Rank(0, 0))
    assert error.value.field == "groups"


def test_unknown_stream_is_refused(two_nodes: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^stream=1: the layout has 1 streams"):
        derive_groups(two_nodes, 1, [], Rank(0, 0))
