"""Copying the runs is the same as copying slot by slot, and the runs are few."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.transfer.extents import Extent, PoolShape, extents
from tknp.transfer.plan import Route

PAGE = 4


@st.composite
def copies(draw: st.DrawFn) -> tuple[Route, list[int], PoolShape, PoolShape, int, int, int]:
    heads = draw(st.integers(1, 3))
    src_head, dst_head = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    src = PoolShape(3, 7, src_head + heads + draw(st.integers(0, 1)), PAGE, 3, 2)
    dst = PoolShape(2, 8, dst_head + heads + draw(st.integers(0, 1)), PAGE, 3, 2)
    token_start = PAGE * draw(st.integers(0, 2))
    page_ids = st.lists(st.integers(0, 6), min_size=5, max_size=5, unique=True)
    route = Route(
        index=0, node=0, tp_rank=0, layers=range(11, 13), heads=range(5, 5 + heads),
        tokens=range(token_start, 18), src_layer=1, dst_layer=0, src_head=src_head,
        dst_head=dst_head, pages=tuple(draw(page_ids)), page_size=PAGE,
    )  # fmt: skip
    start = draw(st.integers(0, 17))
    stop = draw(st.integers(start, 18))
    return route, draw(page_ids), src, dst, draw(st.sampled_from([11, 12])), start, stop


@settings(max_examples=100, deadline=None)
@given(copies())
def test_runs_carry_every_slot_and_nothing_else(
    case: tuple[Route, list[int], PoolShape, PoolShape, int, int, int],
) -> None:
    route, pages, src, dst, layer, start, stop = case
    want = {}
    for values in (0, 1):
        for token in range(max(start, route.tokens.start), stop):
            for head in range(len(route.heads)):
                slot = token % PAGE
                a = src.offset(
                    layer - 10, values, pages[token // PAGE], route.src_head + head, slot
                )
                b = dst.offset(
                    layer - 11, values, route.pages[(token - route.tokens.start) // PAGE],
                    route.dst_head + head, slot,
                )  # fmt: skip
                want.update((b + i, a + i) for i in range(src.slot_bytes))
    runs = extents(route, pages, src, dst, layer, start, stop)
    got = [(run.dst + i, run.src + i) for run in runs for i in range(run.nbytes)]
    assert len(got) == len(want)
    assert dict(got) == want
    assert all(run.dst + run.nbytes <= dst.nbytes for run in runs)
    behind = layer - 11  # every layer has the runs of the first one, shifted
    assert runs == [
        Extent(run.src + behind * src.layer_bytes, run.dst + behind * dst.layer_bytes, run.nbytes)
        for run in extents(route, pages, src, dst, 11, start, stop)
    ]


def route(src_pool: PoolShape, dst_pool: PoolShape, pages: tuple[int, ...]) -> Route:
    return Route(
        index=0, node=0, tp_rank=0, layers=range(1), heads=range(2), tokens=range(12),
        src_layer=0, dst_layer=0, src_head=0, dst_head=0, pages=pages, page_size=PAGE,
    )  # fmt: skip


def test_consecutive_pages_are_one_run_where_all_heads_are_copied() -> None:
    pool = PoolShape(1, 9, 2, PAGE, 3, 2)
    page = 2 * PAGE * pool.slot_bytes
    found = extents(route(pool, pool, (4, 5, 7)), [1, 2, 3], pool, pool, 0, 0, 12)
    keys, values = pool.offset(0, 0, 0, 0, 0), pool.offset(0, 1, 0, 0, 0)
    assert found == [
        Extent(base + a * page, base + b * page, n * page)
        for base in (keys, values)
        for a, b, n in ((1, 4, 2), (3, 7, 1))
    ]


def test_a_whole_page_is_one_run_however_many_heads_the_owner_has() -> None:
    src, dst = PoolShape(1, 9, 2, PAGE, 3, 2), PoolShape(1, 9, 4, PAGE, 3, 2)
    found = extents(route(src, dst, (4, 5, 7)), [1, 2, 3], src, dst, 0, 0, 10)
    page = 2 * PAGE * src.slot_bytes
    half = 2 * src.slot_bytes
    assert [run.nbytes for run in found] == [page, page, half, half] * 2
