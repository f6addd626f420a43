"""Which operations of a program a rank may compute in one go."""

from __future__ import annotations

from itertools import chain

import pytest

from tknp.engine.runs import PARTS, Run, pieces
from tknp.layout.derive import derive
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Program
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig

CONFIG = ModelConfig(101, 32, 64, 6, 4, 2, 8, 512, tied_embeddings=True)


def layout(nodes: int, strategy: Strategy = Strategy.TKNP, tp: int = 1) -> Layout:
    specs = [NodeSpec(memory_bytes=1 << 30)] * nodes
    return make_layout(CONFIG, "float32", tp, specs, strategy=strategy)


def shape_of(program: Program) -> list[range | Kind]:
    return [p.layers if isinstance(p, Run) else p.kind for p in pieces(program)]


def flat(program: Program) -> list[Op]:
    found = pieces(program)
    return list(chain.from_iterable(p.ops if isinstance(p, Run) else (p,) for p in found))


def test_a_node_alone_has_one_run() -> None:
    program = derive(layout(1), 0, [Group((0,), 0, 3)], Rank(0, 0))
    assert shape_of(program) == [Kind.EMBED, range(6), Kind.SAMPLE]
    assert flat(program) == list(program)


def test_a_root_whose_rows_are_all_its_own() -> None:
    pool = layout(2)
    first, second = (pool.routes[0].count(node) for node in (0, 1))
    mine, others = (derive(pool, 0, [Group((0,), 0, 3)], Rank(node, 0)) for node in (0, 1))
    assert range(first) in shape_of(mine)
    assert flat(mine) == list(mine)
    # The owner's rows leave the second root in each of its layers.
    assert not [p for p in shape_of(others) if isinstance(p, range)]
    assert sum(op.kind is Kind.PROJECT for op in others) == second


@pytest.mark.parametrize("node", [0, 1])
def test_rows_of_both_nodes(node: int) -> None:
    groups = [Group((0,), 0, 2), Group((1,), 1, 1)]
    program = derive(layout(2), 0, groups, Rank(node, 0))
    assert pieces(program) == program


def test_partial_attention_and_tensor_parallelism_have_none() -> None:
    wide = derive(layout(2), 0, [Group((0, 1), 0, 2)], Rank(0, 0))
    assert pieces(wide) == wide
    shared = derive(layout(1, tp=2), 0, [Group((0,), 0, 2)], Rank(0, 0))
    assert pieces(shared) == shared


def test_a_run_ends_where_rows_or_layers_do_not_follow() -> None:
    def layer(index: int, rows: int) -> Program:
        return tuple(Op(kind, 0, rows, index) for kind in PARTS)

    gap = (*layer(0, 2), *layer(2, 2))
    assert shape_of(gap) == [range(1), range(2, 3)]
    fewer = (*layer(0, 2), *layer(1, 1))
    assert shape_of(fewer) == [range(1), range(1, 2)]
    assert shape_of(layer(0, 2)[:2]) == [Kind.PROJECT, Kind.ATTEND]
    narrowed = (*layer(0, 2)[:2], Op(Kind.FINISH, 1, 2, 0))
    assert shape_of(narrowed) == list(PARTS)
    assert pieces(()) == ()
