"""The arithmetic of leases: never two at once, and the next within 20 s."""

from __future__ import annotations

import pytest

from tknp_operator.controller.leader import TIMES, Times


def test_a_leader_that_is_cut_off_ends_before_another_acts() -> None:
    assert TIMES.stops_s < TIMES.lease_s


def test_the_next_one_acts_within_20_s() -> None:
    assert TIMES.takeover_s < 20


@pytest.mark.parametrize(
    ("times", "stops_s", "takeover_s"),
    [(Times(15, 8, 2, 2), 14, 19), (Times(30, 10, 5, 1), 17, 40)],
)
def test_what_the_bounds_are_made_of(times: Times, stops_s: int, takeover_s: int) -> None:
    assert (times.stops_s, times.takeover_s) == (stops_s, takeover_s)
