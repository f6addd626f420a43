"""Programs move what Decode Token Parallelism, section 4.4, says: equations (1) to (5).

The published numbers are for Llama 3.1 405B in BF16, batch 128, four nodes of eight GPUs, balanced.
Each test names the facts that it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind, Transfer
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy
from tknp.model.config import ITEM_BYTES

KIB, MIB = 2**10, 2**20
NODES, TP, BATCH = 4, 8, 128


@pytest.fixture(scope="module")
def published(make_step: Any, llama_405b: Any) -> Any:
    layout = make_layout(llama_405b, "bfloat16", TP, [NodeSpec(80 * 10**9)] * NODES)
    return make_step(layout, (BATCH // NODES,) * NODES)


def _transfers(step: Any, kind: Kind) -> Iterable[tuple[int, Transfer]]:
    return ((op.layer, t) for _, op in step.kinds(kind) for t in op.sends)


def _payload(step: Any) -> dict[tuple[int, int], int]:
    """Bytes across nodes of the scatter and gather of each (layer, t)."""
    moved: dict[tuple[int, int], int] = defaultdict(int)
    for kind in (Kind.SCATTER, Kind.GATHER):
        for layer, t in _transfers(step, kind):
            moved[layer, t.src.t] += t.nbytes
    return moved


def _per_owner(published: Any) -> dict[Kind, set[int]]:
    return {
        kind: {t.nbytes for _, t in _transfers(published, kind)}
        for kind in (Kind.SCATTER, Kind.GATHER)
    }


def test_scatter_is_144_kib_per_remote_owner_and_rank(published: Any) -> None:
    """net.tknp_scatter, equation (2)."""
    assert _per_owner(published)[Kind.SCATTER] == {144 * KIB}


def test_gather_is_128_kib_per_remote_owner_and_rank(published: Any) -> None:
    """net.tknp_gather, equation (2)."""
    assert _per_owner(published)[Kind.GATHER] == {128 * KIB}


def test_layer_moves_816_kib_per_rank_group(published: Any) -> None:
    """net.eq3_val: every layer, every group of equal t."""
    payload = _payload(published)
    assert set(payload) == {(layer, t) for layer in range(126) for t in range(TP)}
    assert set(payload.values()) == {816 * KIB}


def test_all_reduce_operand_is_4_mib_and_stays_in_the_node(published: Any) -> None:
    """net.ar_operand; two all-reduces a layer on each rank of its root."""
    reduces = [op for _, op in published.kinds(Kind.ALL_REDUCE) if op.layer >= 0]
    assert {op.operand_bytes for op in reduces} == {4 * MIB}
    assert len(reduces) == 2 * 126 * TP
    assert not any(op.sends or op.recvs for op in reduces)


def test_gather_is_one_of_n_times_t_parts_of_the_operand(published: Any) -> None:
    """net.gather_over_ar."""
    (gather,) = _per_owner(published)[Kind.GATHER]
    operands = {op.operand_bytes for _, op in published.kinds(Kind.ALL_REDUCE) if op.layer >= 0}
    assert {gather / operand for operand in operands} == {1 / (NODES * TP)} == {0.03125}


@pytest.fixture(scope="module")
def published_dcp(group_step: Any, llama_405b: Any) -> Any:
    """DCP degree 4 with TP 32: eight heads' groups over four nodes."""
    nodes = [NodeSpec(80 * 10**9)] * NODES
    layout = make_layout(llama_405b, "bfloat16", TP, nodes, strategy=Strategy.DCP)
    return group_step(layout, (Group((0, 1, 2, 3), 0, BATCH),))


def test_output_of_dcp_is_512_kib_a_rank(published_dcp: Any) -> None:
    """net.dcp_out, equation (4): [B, Hq / T, dh]."""
    heads = published_dcp.layout.heads
    outputs = {op.rows * heads(rank).q_width * 2 for rank, op in published_dcp.kinds(Kind.ATTEND)}
    assert outputs == {512 * KIB}
    scattered = {t.nbytes for _, t in _transfers(published_dcp, Kind.REDUCE_SCATTER)}
    assert scattered == {512 * KIB // NODES}


def test_statistics_of_dcp_are_8_kib_a_rank(published_dcp: Any) -> None:
    """net.dcp_lse, equation (4): float32 [B, Hq / T]."""
    assert {t.nbytes for _, t in _transfers(published_dcp, Kind.LSE_GATHER)} == {8 * KIB}


def test_gather_is_a_quarter_of_the_output_of_dcp(published: Any, published_dcp: Any) -> None:
    """net.reduction, net.eq5."""
    (gather,) = _per_owner(published)[Kind.GATHER]
    op = next(op for _, op in published_dcp.kinds(Kind.ATTEND))
    output = op.rows * published_dcp.layout.heads(Rank(0, 0)).q_width * 2
    assert 1 - gather / output == 0.75


def test_dense_all_reduces_of_dcp_cross_nodes_at_the_same_size(published_dcp: Any) -> None:
    reduces = [op for _, op in published_dcp.kinds(Kind.ALL_REDUCE) if op.layer >= 0]
    assert {(op.operand_bytes, op.scope) for op in reduces} == {(4 * MIB, "pool")}


@settings(max_examples=40)
@given(data=st.data())
def test_shapes_follow_equations_1_and_2(data: st.DataObject, steps: Any) -> None:
    """Beyond Hkv ranks each holds one of the KV heads, so that Hkv counts as T."""
    step = data.draw(steps)
    layout, config = step.layout, step.layout.config
    kv_heads = max(config.kv_heads, layout.tp)
    qkv = (config.q_heads + 2 * kv_heads) * config.head_dim // layout.tp
    for rank in layout.ranks():
        assert layout.heads(rank).qkv_width == qkv
    for layer, t in _transfers(step, Kind.SCATTER):
        assert t.src.node == layout.roots(0)[layer]
        assert t.shape == (step.rows[t.dst.node], qkv)
        assert t.item_bytes == ITEM_BYTES[layout.dtype]
    for layer, t in _transfers(step, Kind.GATHER):
        assert t.dst.node == layout.roots(0)[layer]
        assert t.shape == (step.rows[t.src.node], config.q_heads // layout.tp * config.head_dim)
        assert t.item_bytes == ITEM_BYTES[layout.dtype]


@settings(max_examples=40)
@given(data=st.data())
def test_payload_follows_equation_3(data: st.DataObject, steps: Any) -> None:
    """2 s (Hq + Hkv) dh / T times the rows of all nodes but the root."""
    step = data.draw(steps)
    layout, config = step.layout, step.layout.config
    kv_heads = max(config.kv_heads, layout.tp)
    row = 2 * layout.item_bytes * (config.q_heads + kv_heads) * config.head_dim // layout.tp
    payload = _payload(step)
    for layer, root in enumerate(layout.roots(0)):
        for t in range(layout.tp):
            assert payload.get((layer, t), 0) == row * (step.batch - step.rows[root])


@settings(max_examples=40)
@given(data=st.data())
def test_output_follows_equation_5(data: st.DataObject, steps: Any) -> None:
    """|O_TKNP,g| / |O_DCP| = Bg / B, O_DCP by equation (4)."""
    step = data.draw(steps)
    config, tp = step.layout.config, step.layout.tp
    dcp_output = step.batch * (config.q_heads // tp) * config.head_dim * step.layout.item_bytes
    for _, t in _transfers(step, Kind.GATHER):
        assert t.nbytes * step.batch == dcp_output * step.rows[t.src.node]


def test_attention_moves_no_row_of_the_root(published: Any) -> None:
    roots = published.layout.roots(0)
    for kind in (Kind.SCATTER, Kind.GATHER):
        for layer, t in _transfers(published, kind):
            start, stop = published.spans[roots[layer]]
            assert t.stop <= start or stop <= t.start
            assert Rank(roots[layer], t.src.t) in (t.src, t.dst)
