"""The arithmetic of leases: never two at once, and the next within 20 s."""

from __future__ import annotations

from typing import Any

import pytest

from tknp_operator.controller.leader import TIMES, Renewals, Times


class Lock:
    """Writes take 2 s of a clock, and are carried out unless `refuses`."""

    def __init__(self) -> None:
        self.now_s, self.refuses = 100.0, False

    def create(self, name: str) -> bool:
        self.now_s += 2
        return not self.refuses

    def update(self, name: str) -> bool:
        return self.create(name)


def test_a_leader_that_is_cut_off_ends_before_another_acts() -> None:
    assert TIMES.stops_s < TIMES.lease_s


def test_the_next_one_acts_within_20_s() -> None:
    assert TIMES.takeover_s < 20


@pytest.mark.parametrize(
    ("times", "stops_s", "takeover_s"),
    [(Times(15, 8, 2, 2), 13, 19), (Times(30, 10, 5, 1), 25, 40)],
)
def test_what_the_bounds_are_made_of(times: Times, stops_s: int, takeover_s: int) -> None:
    assert (times.stops_s, times.takeover_s) == (stops_s, takeover_s)


def test_a_renewal_counts_from_its_beginning_and_only_if_it_was_carried_out() -> None:
    lock: Any = Lock()
    renewals = Renewals(lock, lambda: lock.now_s)
    for write, refuses, last_s in (
        (lock.create, False, 100.0), (lock.update, False, 102.0), (lock.update, True, 102.0),
        (lock.update, False, 106.0),
    ):  # fmt: skip
        lock.refuses = refuses
        assert write("turns") is not refuses
        assert renewals.last_s == last_s
