"""Computing threads on cores of their own: all of them or none, and nobody else."""

import os
import threading

import pytest

from tknp.kernels.cores import keep_cores

pytestmark = pytest.mark.usefixtures("kernels")
ALLOWED = os.sched_getaffinity(0)


def affinities() -> dict[int, set[int]]:
    """Cores of every thread of this process."""
    return {int(task): os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")}


def in_a_thread(call):
    """The result of `call`, on a thread that ends with it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.skipif(len(ALLOWED) < 2, reason="one core")
def test_as_many_threads_as_cores(threads) -> None:
    threads(len(ALLOWED))
    before = affinities()

    def keep():
        cores, mine = keep_cores(), os.sched_getaffinity(0)
        return cores, mine, affinities()

    cores, mine, during = in_a_thread(keep)
    assert set(cores) == ALLOWED
    assert mine == {cores[0]}
    kept = [found for task, found in during.items() if found != before.get(task)]
    assert sorted(map(sorted, kept)) == [[core] for core in sorted(ALLOWED)]
    assert all(during[task] == found for task, found in before.items() if task in during)
    assert in_a_thread(lambda: os.sched_getaffinity(0)) == ALLOWED


@pytest.mark.parametrize("more", [-1, 1])
def test_other_numbers_of_threads_are_left_alone(threads, more) -> None:
    threads(max(len(ALLOWED) + more, 1))

    def keep():
        return keep_cores(), os.sched_getaffinity(0)

    assert in_a_thread(keep) == ((), ALLOWED)


def test_one_core_is_left_alone(threads) -> None:
    threads(1)

    def keep():
        os.sched_setaffinity(0, {min(ALLOWED)})
        return keep_cores()

    assert in_a_thread(keep) == ()
