from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from tknp.engine.thread import EngineThread


def test_calls_run_in_order_and_their_errors_are_their_own() -> None:
    thread = EngineThread("test")
    seen: list[int] = []
    first = thread.submit(seen.append, 1)
    failing = thread.submit(lambda: 1 // 0)
    last = thread.submit(seen.append, 2)
    assert (first.result(), last.result(), seen) == (None, None, [1, 2])
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert thread.close(10)


def test_closing_cancels_what_waits_and_tells_of_what_hangs() -> None:
    thread = EngineThread("test")
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> int:
        begun.set()
        go_on.wait()
        return 7

    hanging, waiting = thread.submit(hang), thread.submit(hang)
    begun.wait()
    assert not thread.close(0)
    go_on.set()
    assert hanging.result() == 7
    with pytest.raises(CancelledError):
        waiting.result()
    assert thread.close(10)


def test_what_is_posted_runs_in_turn_and_its_error_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    thread = EngineThread("test")
    seen: list[int] = []
    thread.post(lambda: seen.append(1))
    thread.post(lambda: seen.append(1 // 0))
    thread.submit(seen.append, 2).result()
    assert seen == [1, 2]
    assert "ZeroDivisionError" in caplog.text
    assert thread.close(10)
