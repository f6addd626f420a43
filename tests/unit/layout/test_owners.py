"""Which node owns a request, and the order of a step's rows."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.layout.owners import NodeLoad, choose_owner, fits_ever, owner_major

loads = st.lists(
    st.builds(lambda used, free: NodeLoad(used + free, used), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=5,
)
needs = st.integers(1, 20)
few = settings(max_examples=50)


@few
@given(loads, needs)
def test_owner_is_the_eligible_node_with_the_lowest_load(pool: list[NodeLoad], need: int) -> None:
    owner = choose_owner(pool, need)
    eligible = [n for n, load in enumerate(pool) if load.pages - load.used >= need]
    if owner is None:
        assert not eligible
    else:
        assert owner in eligible
        assert pool[owner].used == min(pool[n].used for n in eligible)


@few
@given(loads, needs)
def test_ties_go_to_the_first_node(pool: list[NodeLoad], need: int) -> None:
    owner = choose_owner(pool, need)
    if owner is not None:
        assert all(load.used > pool[owner].used or load.free < need for load in pool[:owner])


@few
@given(loads, needs)
def test_request_that_fits_nowhere_waits_if_it_fits_an_empty_node(
    pool: list[NodeLoad], need: int
) -> None:
    empty = [NodeLoad(load.pages, 0) for load in pool]
    assert fits_ever(pool, need) is (choose_owner(empty, need) is not None)
    if choose_owner(pool, need) is not None:
        assert fits_ever(pool, need)


def test_least_loaded_node_without_room_is_passed_over() -> None:
    small_idle, large_busy = NodeLoad(pages=4, used=0), NodeLoad(pages=100, used=50)
    assert choose_owner([small_idle, large_busy], 4) == 0
    assert choose_owner([small_idle, large_busy], 5) == 1


def test_root_only_node_never_owns() -> None:
    assert choose_owner([NodeLoad(0, 0), NodeLoad(8, 7)], 1) == 1
    assert choose_owner([NodeLoad(0, 0), NodeLoad(8, 8)], 1) is None
    assert not fits_ever([NodeLoad(0, 0)], 1)


@given(st.data())
def test_rows_stand_by_owner_and_then_by_slot(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 5))
    owners = data.draw(st.dictionaries(st.integers(0, 50), st.integers(0, nodes - 1)))
    order, counts = owner_major(owners, nodes)
    assert sorted(order) == sorted(owners)
    assert len(counts) == nodes
    start = 0
    for node, count in enumerate(counts):
        slots = order[start : start + count]
        assert all(owners[slot] == node for slot in slots)
        assert list(slots) == sorted(slots)
        start += count
    assert start == len(owners)


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 4)), st.randoms())
def test_row_order_does_not_depend_on_the_order_of_admission(
    owners: dict[int, int], random: object
) -> None:
    items = list(owners.items())
    random.shuffle(items)  # type: ignore[attr-defined]
    assert owner_major(dict(items), 5) == owner_major(owners, 5)
