from __future__ import annotations

from tknp.rpc.stall import Stall


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_pending_work_without_progress_is_hung_after_the_limit() -> None:
    clock = Clock()
    stall = Stall(clock, limit_s=30)
    assert not stall.look(pending=True, done=4)
    clock.now_s = 29.9
    assert not stall.look(pending=True, done=4)
    clock.now_s = 30
    assert stall.look(pending=True, done=4) == "no progress for 30 s while work is pending"


def test_progress_and_idle_times_start_the_limit_anew() -> None:
    clock = Clock()
    stall = Stall(clock, limit_s=30)
    for done, now_s in enumerate((0.0, 20.0, 40.0)):
        clock.now_s = now_s
        assert not stall.look(pending=True, done=done)
    clock.now_s = 1000
    assert not stall.look(pending=False, done=2)
    clock.now_s = 2000
    assert not stall.look(pending=True, done=2)
