"""Which operations of a program a rank may compute in one go."""

from __future__ import annotations

from itertools import chain

import pytest

from tknp.engine.runs import Run, Takes, pieces
from tknp.layout.derive import derive
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Program
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig

PARTS = (Kind.PROJECT, Kind.ATTEND, Kind.FINISH)
OWN = (Kind.SCATTER, Kind.ATTEND, Kind.GATHER)
CONFIG = ModelConfig(101, 32, 64, 6, 4, 2, 8, 512, tied_embeddings=True)


def layout(nodes: int, strategy: Strategy = Strategy.TKNP, tp: int = 1) -> Layout:
    specs = [NodeSpec(memory_bytes=1 << 30)] * nodes
    return make_layout(CONFIG, "float32", tp, specs, strategy=strategy)


def inside(op: Op) -> bool:
    """What is run in one go where nothing moves messages beside it."""
    return op.kind in PARTS and not op.partial


def also_between(op: Op) -> bool:
    """The same where something does, but for what owners of one request exchange."""
    return op.kind in (*PARTS, *OWN) and not op.partial


def shape_of(program: Program, takes: Takes = inside) -> list[range | Kind]:
    return [p.layers if isinstance(p, Run) else p.kind for p in pieces(program, takes)]


def flat(program: Program, takes: Takes = inside) -> list[Op]:
    found = pieces(program, takes)
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
    """Layers of the one root, then those of the other: all operations but what joins them."""
    groups = [Group((0,), 0, 2), Group((1,), 1, 1)]
    pool = layout(2)
    program = derive(pool, 0, groups, Rank(node, 0))
    assert pieces(program, inside) == program
    first = pool.routes[0].count(0)
    found = [piece for piece in pieces(program, also_between) if isinstance(piece, Run)]
    assert [run.layers for run in found] == [range(first), range(first, 6)]
    rooted, owned = found if node == 0 else reversed(found)
    assert [op.kind for op in rooted.stages] == [PARTS[0], *OWN, PARTS[2]]
    assert [op.kind for op in owned.stages] == list(OWN)
    assert rooted.exchanges
    assert flat(program, also_between) == list(program)


def test_a_root_without_rows_of_its_own_and_owners_of_several_roots() -> None:
    pool = layout(3)
    groups = [Group((1,), 1, 2), Group((2,), 2, 1)]
    counts = [pool.routes[0].count(node) for node in range(3)]
    blocks = [range(counts[0]), range(counts[0], sum(counts[:2])), range(sum(counts[:2]), 6)]
    root = pieces(derive(pool, 0, groups, Rank(0, 0)), also_between)
    (run,) = (piece for piece in root if isinstance(piece, Run))
    assert run.layers == blocks[0]
    assert Kind.ATTEND not in {op.kind for op in run.ops}
    owner = derive(pool, 0, groups, Rank(2, 0))
    assert [p for p in shape_of(owner, also_between) if isinstance(p, range)] == blocks


def test_layers_with_an_operation_that_is_not_taken_have_none() -> None:
    groups = [Group((0,), 0, 2), Group((1,), 1, 1)]
    program = derive(layout(2), 0, groups, Rank(0, 0))
    first = layout(2).routes[0].count(0)
    found = shape_of(program, lambda op: also_between(op) and op.kind is not Kind.PROJECT)
    assert [piece for piece in found if isinstance(piece, range)] == [range(first, 6)]


def test_a_root_of_several_ranks_has_them_where_it_only_owns() -> None:
    pool = layout(2, tp=2)
    program = derive(pool, 0, [Group((0,), 0, 2), Group((1,), 1, 1)], Rank(0, 1))
    found = [piece for piece in shape_of(program, also_between) if isinstance(piece, range)]
    assert found == [range(pool.routes[0].count(0), 6)]


def test_partial_attention_and_tensor_parallelism_have_none() -> None:
    wide = derive(layout(2), 0, [Group((0, 1), 0, 2)], Rank(0, 0))
    assert pieces(wide, also_between) == wide
    shared = derive(layout(1, tp=2), 0, [Group((0,), 0, 2)], Rank(0, 0))
    assert pieces(shared, also_between) == shared


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
    assert pieces((), inside) == ()
