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
from tknp.layout.derive import derive
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Transfer, sent_bytes
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy

WHAT = {
    Kind.SCATTER: {"qkv", "q"},
    Kind.QUERY: {"qkv"},
    Kind.GATHER: {"attention", "lse"},
    Kind.EXCHANGE: {"attention", "lse"},
    Kind.LSE_GATHER: {"lse"},
    Kind.REDUCE_SCATTER: {"attention"},
    Kind.HANDOFF: {"x"},
    Kind.SAMPLE: {"logits"},
    Kind.FEEDBACK: {"ids"},
}
MOVES = tuple(WHAT)
few = settings(max_examples=30)
DENSE = (Kind.PROJECT, Kind.FINISH, Kind.OUTPUT, Kind.MLP)


@few
@given(data=st.data())
def test_every_send_has_one_receive_of_equal_shape_bytes_and_rows(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
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
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    order: dict[tuple[Rank, Rank, Rank], list[Transfer]] = defaultdict(list)
    for rank, op in step.kinds(*Kind):
        for t in (*op.sends, *op.recvs):
            order[rank, t.src, t.dst].append(t)
    for (rank, src, dst), transfers in order.items():
        peer = dst if rank == src else src
        assert order[peer, src, dst] == transfers


@few
@given(data=st.data())
def test_transfers_stay_inside_their_operation_and_between_equal_ranks(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    layout = step.layout
    for rank, op in step.kinds(*Kind):
        assert 0 <= op.start < op.stop <= step.batch
        assert op.kind in MOVES or not (op.sends or op.recvs)
        for t in (*op.sends, *op.recvs):
            assert t.src != t.dst
            assert op.start <= t.start < t.stop <= op.stop
            assert t.shape == (t.stop - t.start, t.width)
            assert t.nbytes == t.shape[0] * t.shape[1] * t.item_bytes > 0
            assert t.crosses_nodes is (layout.domain(t.src) != layout.domain(t.dst))
            assert t.what in WHAT[op.kind]
            if op.kind not in (Kind.SAMPLE, Kind.FEEDBACK):
                assert t.src.node != t.dst.node
                assert t.src.t == t.dst.t == rank.t


@few
@given(data=st.data())
def test_columns_are_those_of_the_sender(data: st.DataObject, any_steps: Any) -> None:
    step = data.draw(any_steps)
    for rank, op in step.kinds(*MOVES):
        heads = step.layout.heads(rank)
        row = {
            "qkv": heads.projected_width if op.kind is Kind.QUERY else heads.qkv_width,
            "q": heads.q_width,
            "attention": heads.q_width,
            "lse": len(heads.q_heads),
            "x": step.layout.config.hidden_size,
            "logits": len(heads.vocab),
            "ids": 1,
        }
        for t in op.sends:
            assert 0 <= t.column < t.column + t.width <= row[t.what]
            if op.kind not in (Kind.EXCHANGE, Kind.REDUCE_SCATTER):
                assert (t.column, t.width) == (0, row[t.what])


@few
@given(data=st.data())
def test_rows_are_attended_once_a_layer_by_all_who_keep_them(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    layout = step.layout
    found: Counter[tuple[Rank, int, int, bool]] = Counter()
    for rank, op in step.kinds(Kind.ATTEND):
        found.update((rank, op.layer, row, op.partial) for row in range(op.start, op.stop))

    def keepers(layer: int, row: int) -> tuple[int, ...]:
        pipelined = layout.divides == "layers"
        return (layout.roots(step.stream)[layer],) if pipelined else step.group_of[row].owners

    assert found == Counter(
        (Rank(node, t), layer, row, len(keepers(layer, row)) > 1)
        for layer in range(layout.config.layers)
        for row in range(step.batch)
        for node in keepers(layer, row)
        for t in range(layout.tp)
    )


@few
@given(data=st.data())
def test_dense_work_covers_the_batch_once_where_the_weights_are(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    layout = step.layout
    found = Counter((rank, op.kind, op.layer) for rank, op in step.kinds(*DENSE))
    whole = layout.dense_tp == 1
    kinds = (Kind.PROJECT, Kind.FINISH) if whole else (Kind.PROJECT, Kind.OUTPUT, Kind.MLP)
    expected = Counter(
        (rank, kind, layer)
        for layer, root in enumerate(layout.roots(step.stream))
        for rank in layout.ranks()
        if layout.spread or rank.node == root
        for kind in kinds
    )
    assert found == (expected if step.batch else Counter())
    for rank, kind, layer in found:
        assert any(layer in shard.layers for shard in layout.shards(rank)), (rank, kind)
    for _, op in step.kinds(*DENSE, Kind.EMBED, Kind.HANDOFF, Kind.SAMPLE, Kind.FEEDBACK):
        assert (op.start, op.stop) == (0, step.batch)


@few
@given(data=st.data())
def test_endpoints_run_once_where_their_weights_are(data: st.DataObject, any_steps: Any) -> None:
    step = data.draw(any_steps)
    layout, stream = step.layout, step.stream
    ends = ((Kind.EMBED, layout.first_root(stream)), (Kind.SAMPLE, layout.sampler(stream)))
    for kind, node in ends:
        where = sorted(rank for rank, _ in step.kinds(kind))
        expected = [r for r in layout.ranks() if layout.spread or r.node == node]
        assert where == (expected if step.batch else [])
        for rank in where:
            shards = layout.shards(rank)
            tied = layout.config.tied_embeddings
            assert any(s.embedding if kind is Kind.EMBED or tied else s.head for s in shards)


@few
@given(data=st.data())
def test_only_members_of_a_stream_run_its_steps(data: st.DataObject, any_steps: Any) -> None:
    step = data.draw(any_steps)
    members = step.layout.members(step.stream)
    assert {rank.node for rank, _ in step.kinds(*Kind)} <= set(members)
    if step.layout.strategy is Strategy.DP:
        assert members == (step.stream,)


@few
@given(data=st.data())
def test_merges_name_all_owners_and_only_wide_rows_are_merged(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    layout = step.layout
    merged: Counter[tuple[Rank, int, int]] = Counter()
    for rank, op in step.kinds(Kind.MERGE):
        for row in range(op.start, op.stop):
            assert op.owners == step.group_of[row].owners
            merged[rank, op.layer, row] += 1
    helix = layout.strategy is Strategy.HELIX and layout.nodes > 1
    rooted = layout.divides == "tokens" and not layout.spread
    assert merged == Counter(
        (rank, layer, row)
        for layer, root in enumerate(layout.roots(step.stream))
        for row in range(step.batch)
        for rank in layout.ranks()
        if helix or (rooted and rank.node == root and step.group_of[row].wide)
    )


@few
@given(data=st.data())
def test_residual_stream_is_handed_over_only_where_the_root_changes(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    layout, roots = step.layout, step.layout.roots(step.stream)
    receivers = [*roots[1:], layout.sampler(step.stream)]
    expected = {
        (layer, Rank(src, t), Rank(dst, t))
        for layer, (src, dst) in enumerate(zip(roots, receivers, strict=True))
        for t in range(layout.tp)
        if src != dst and step.batch
    }
    found = {(op.layer, t.src, t.dst) for _, op in step.kinds(Kind.HANDOFF) for t in op.sends}
    assert found == expected
    if not layout.config.tied_embeddings:
        assert layout.config.layers - 1 not in {layer for layer, _, _ in found}


@few
@given(data=st.data())
def test_ids_return_to_every_rank_that_embeds(data: st.DataObject, any_steps: Any) -> None:
    step = data.draw(any_steps)
    layout, stream = step.layout, step.stream
    drawer = Rank(layout.sampler(stream), 0)
    found = {t.dst for _, op in step.kinds(Kind.FEEDBACK) for t in op.recvs}
    readers = {rank for rank, _ in step.kinds(Kind.EMBED)} - {drawer}
    assert found == readers
    assert all(layout.embeds(stream, rank) for rank in readers)
    assert {r for r, op in step.kinds(Kind.FEEDBACK) if op.sends} <= {drawer}


@few
@given(data=st.data())
def test_all_reduces_follow_partial_sums_on_every_rank_of_their_scope(
    data: st.DataObject, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    layout = step.layout
    partial = (Kind.EMBED, Kind.OUTPUT, Kind.MLP)
    for rank, program in step.programs.items():
        for op, after in pairwise((*program, None)):
            reduces = after is not None and after.kind is Kind.ALL_REDUCE
            assert reduces is (op.kind in partial and layout.dense_tp > 1)
        first = step.programs[Rank(0 if layout.spread else rank.node, 0)]
        assert _reduces(program) == _reduces(first)
        scopes = {op.scope for op in _reduces(program)}
        assert scopes <= {"pool" if layout.spread else "node"}


def _reduces(program: tuple[Op, ...]) -> list[Op]:
    return [op for op in program if op.kind is Kind.ALL_REDUCE]


@few
@given(data=st.data())
def test_programs_of_equal_arguments_are_equal(data: st.DataObject, any_steps: Any) -> None:
    """Also on another process, which derives them from a layout of its own."""
    step = data.draw(any_steps)
    held = tuple(tuple(replace(block) for block in blocks) for blocks in step.layout.held)
    twin = replace(step.layout, held=held)
    assert twin is not step.layout
    for rank in step.layout.ranks():
        assert derive(twin, step.stream, list(step.groups), rank) == step.programs[rank]


def test_no_context_length_enters_a_program() -> None:
    parameters = list(inspect.signature(derive).parameters)
    assert parameters == ["layout", "stream", "groups", "rank"]
    assert Group._fields == ("owners", "appender", "rows")


@few
@given(data=st.data(), length=st.integers(1, 2**20))
def test_programs_do_not_depend_on_the_context_length_of_the_model(
    data: st.DataObject, length: int, any_steps: Any
) -> None:
    step = data.draw(any_steps)
    longer = replace(step.layout, config=replace(step.layout.config, max_position=length))
    assert replace(step, layout=longer).programs == step.programs


@few
@given(data=st.data())
def test_sent_bytes_split_by_the_reach_of_a_transfer(data: st.DataObject, any_steps: Any) -> None:
    step = data.draw(any_steps)
    domain = step.layout.domain
    for program in step.programs.values():
        sends = [t for op in program for t in op.sends]
        across = sent_bytes(program, cross_node=True)
        assert across == sum(t.nbytes for t in sends if domain(t.src) != domain(t.dst))
        assert across + sent_bytes(program, cross_node=False) == sum(t.nbytes for t in sends)


def _kinds(step: Any, node: int) -> list[str]:
    return [op.kind.value for op in step.programs[Rank(node, 0)] if op.layer == 0]


def test_step_without_rows_is_empty(two_nodes: Any, make_step: Any) -> None:
    assert set(make_step(two_nodes, (0, 0)).programs.values()) == {()}


def test_node_without_rows_takes_no_part_in_attention(two_nodes: Any, make_step: Any) -> None:
    assert _kinds(make_step(two_nodes, (0, 4)), 0) == ["project", "scatter", "gather", "finish"]
    local = make_step(two_nodes, (4, 0))
    assert _kinds(local, 0) == ["project", "attend", "finish"]
    assert all(op.layer >= 2 for op in local.programs[Rank(1, 0)][1:-2])


def test_program_of_one_layer_reads_as_the_design_has_it(two_nodes: Any, make_step: Any) -> None:
    step = make_step(two_nodes, (2, 3))
    assert _kinds(step, 0) == ["project", "scatter", "attend", "gather", "finish"]
    assert _kinds(step, 1) == ["scatter", "attend", "gather"]


def test_wide_row_goes_to_all_owners_and_comes_back_in_parts(
    two_nodes: Any, group_step: Any
) -> None:
    """k and v go to the appender alone; the LSE comes back beside each partial output."""
    groups = (Group((0,), 0, 2), Group((0, 1), 1, 1), Group((1, 0), 0, 2))
    step = group_step(two_nodes, groups)
    root, owner = step.programs[Rank(0, 0)], step.programs[Rank(1, 0)]
    assert _kinds(step, 0) == [
        "project", "scatter", "attend", "attend", "attend", "gather", "merge", "merge", "finish",
    ]  # fmt: skip
    assert _kinds(step, 1) == ["scatter", "attend", "attend", "gather"]
    scatter = next(op for op in root if op.kind is Kind.SCATTER)
    gather = next(op for op in owner if op.kind is Kind.GATHER)
    assert [(t.what, t.start, t.stop, t.width) for t in scatter.sends] == [
        ("qkv", 2, 3, 960),
        ("q", 3, 5, 576),
    ]
    assert [(t.what, t.start, t.stop, t.width, t.item_bytes) for t in gather.sends] == [
        ("attention", 2, 3, 576, 4), ("lse", 2, 3, 9, 4),
        ("attention", 3, 5, 576, 4), ("lse", 3, 5, 9, 4),
    ]  # fmt: skip
    merges = [op.owners for op in root if op.kind is Kind.MERGE and op.layer == 0]
    assert merges == [(0, 1), (1, 0)]


def test_overlap_cuts_the_exchange_of_helix_and_merges_last(model: Any, group_step: Any) -> None:
    config = model(2, 1, 2, 1, 1, 2)
    layout = make_layout(
        config, "float32", 1, [NodeSpec(0)] * 2, strategy=Strategy.HELIX, overlap=2
    )
    step = group_step(layout, (Group((0, 1), 0, 5),))
    assert _kinds(step, 1) == [
        "project", "attend", "exchange", "attend", "exchange", "merge", "merge",
        "output", "all_reduce", "mlp", "all_reduce",
    ]  # fmt: skip
    spans = [(op.start, op.stop) for _, op in step.kinds(Kind.MERGE)]
    assert spans == [(0, 2), (2, 5)] * 2
    plain = replace(step, layout=replace(layout, overlap=1))
    assert _kinds(plain, 0)[1:4] == ["attend", "exchange", "merge"]


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
        derive(layout, 0, groups, Rank(0, 0))
    assert error.value.field == "groups"


def test_unknown_stream_is_refused(two_nodes: Any) -> None:
    with pytest.raises(InvalidValue, match=r"^stream=1: the layout has 1 streams"):
        derive(two_nodes, 1, [], Rank(0, 0))
