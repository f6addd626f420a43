from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tknp.kv.free_runs import FreeRuns


def test_takes_the_shortest_run_that_fits() -> None:
    runs = FreeRuns(1, 21)
    pages = runs.take(20)
    runs.give(pages[:8])
    runs.give(pages[10:14])
    assert runs.runs() == [(1, 9), (11, 15)]
    assert runs.take(3) == [11, 12, 13]
    assert runs.take(5) == [1, 2, 3, 4, 5]


def test_spans_runs_longest_first_when_none_fits() -> None:
    runs = FreeRuns(1, 13)
    pages = runs.take(12)
    runs.give([*pages[:2], *pages[3:8], *pages[9:12]])
    assert runs.take(6) == [4, 5, 6, 7, 8, 1]
    assert runs.runs() == [(2, 3), (10, 13)]


def test_grows_behind_the_last_page_where_that_is_free() -> None:
    runs = FreeRuns(1, 11)
    pages = runs.take(10)
    runs.give([2, 5, 6, 7])
    assert runs.take(2, after=pages[3]) == [5, 6]
    assert runs.take(1, after=pages[3]) == [2]


def test_neighbours_coalesce() -> None:
    runs = FreeRuns(0, 5)
    pages = runs.take(5)
    for page in (pages[0], pages[2], pages[4], pages[1], pages[3]):
        runs.give([page])
    assert runs.runs() == [(0, 5)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_is_a_set_of_pages_in_maximal_runs(moves: list[tuple[bool, int]]) -> None:
    runs, taken = FreeRuns(1, 30), list[list[int]]()
    free = set(range(1, 30))
    for give, amount in moves:
        if give and taken:
            pages = taken.pop(amount % len(taken))
            runs.give(pages)
            free |= set(pages)
        elif not give and amount <= len(runs):
            pages = runs.take(amount)
            assert len(set(pages)) == amount
            assert set(pages) <= free
            free -= set(pages)
            taken.append(pages)
        assert set(runs) == free
        assert len(runs) == len(free)
        starts_and_stops = [edge for run in runs.runs() for edge in run]
        assert all(a < b for a, b in pairwise(starts_and_stops))
