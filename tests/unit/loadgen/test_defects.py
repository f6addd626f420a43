"""What other load generators get wrong, each as a test that their way of doing it would fail."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tknp_loadgen.echo.script import Received, Script, Step
from tknp_loadgen.measure.percentile import distribution
from tknp_loadgen.run.plan import Load, WorkerPlan
from tknp_loadgen.run.timer import make_timer
from tknp_loadgen.run.worker import Worker
from tknp_loadgen.target.base import Call, Ending, Sink
from tknp_loadgen.target.factory import TargetSettings
from tknp_loadgen.target.http1 import SPARE
from tknp_loadgen.trace.prompts import Prompt

RunEcho = Callable[..., Any]
TraceOf = Callable[..., Any]
APIS = pytest.mark.parametrize("api", ["http", "grpc"])
QUICK = Script((Step(0.0, 2),))


class Together:
    """Server time that goes on only when `count` requests have arrived."""

    def __init__(self, count: int) -> None:
        self._missing = count
        self._all = asyncio.Event()

    async def pause(self, seconds: float) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._all.set()
        await self._all.wait()

    async def written(self) -> None: ...


async def until(condition: Callable[[], bool]) -> None:
    """Wait for another task; pytest's own limit ends a wait in vain."""
    while not condition():  # noqa: ASYNC110  # the state of the server
        await asyncio.sleep(0.005)


@APIS
async def test_no_cap_on_connections(run_echo: RunEcho, trace_of: TraceOf, api: str) -> None:
    """A pool of 100 connections deadlocks here: nobody is answered before all 150 are there."""
    trace = trace_of([2] * 150)
    result, seen = await run_echo(
        trace, lambda _: QUICK, api, virtual=False, server_time=Together(150), connections=None
    )
    assert seen.most_open == 150
    assert result.summary["completed"] == 150


async def test_connections_are_open_before_they_are_needed(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    """Handshakes within the run would count as TTFT, and one session a request smears a burst."""
    result, seen = await run_echo(
        trace_of([2] * 40), lambda _: QUICK, "http", virtual=False, server_time=Together(40),
        connections=None,
    )  # fmt: skip
    assert result.summary["client"]["late_connections"] == 0
    assert 40 <= seen.connections <= 40 + 2 * SPARE
    assert result.summary["client_lag_ms"]["burst_spread"] is not None


@APIS
async def test_concurrency_never_exceeds_its_limit(
    run_echo: RunEcho, trace_of: TraceOf, api: str
) -> None:
    """45 became 74.5 in a peer."""
    _, seen = await run_echo(
        trace_of([2] * 30), lambda _: QUICK, api, virtual=False, max_concurrency=4
    )
    assert seen.requests == 30
    assert 1 <= seen.most_open <= 4


async def test_events_of_any_size_arrive(run_echo: RunEcho, trace_of: TraceOf) -> None:
    """Line limits and small read buffers break or slow down long events."""
    script = Script((Step(0.1, 60_000), Step(0.1, 60_000)))
    result, _ = await run_echo(trace_of([120_000]), lambda _: script, "http", virtual=False)
    assert result.summary["completed"] == 1
    assert result.summary["completed_tokens"] == 120_000


class SlowToSend:
    """A target that takes 3 ms of the client's time to send, on a clock of its own."""

    late_connections = 0

    def __init__(self, cost_ns: int) -> None:
        self.now_ns = 0
        self._cost_ns = cost_ns

    def clock(self) -> int:
        return self.now_ns

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        def arrive() -> None:
            self.now_ns = max(self.now_ns, deadline_ns)
            callback()

        asyncio.get_running_loop().call_soon(arrive)

    async def open(self, connections: int) -> None: ...
    def encode(self, prompt: Prompt, output_tokens: int) -> bytes:
        return b"x"

    def begin(self, payload: bytes, sink: Sink) -> Call:
        self.now_ns += self._cost_ns
        sink.released()
        sink.tokens(1, self.now_ns)
        sink.ended(Ending("length", 1))
        return self

    def cancel(self) -> None: ...

    async def close(self) -> None: ...


@pytest.mark.parametrize(("gap_ms", "latest_ms"), [(10, 3), (1, 3 + 2 * 99)])
async def test_deadlines_are_absolute(
    trace_of: TraceOf, tmp_path: Any, gap_ms: float, latest_ms: float
) -> None:
    """Sleeping between sends adds each send's cost to the next gap: 1.5 s late after 10 s at 200/s.

    Here lateness passes as soon as there is time, and where there is none it is reported: nothing
    is dropped or moved.
    """
    trace = trace_of([1] * 100, np.arange(100) * gap_ms / 1e3)
    target = SlowToSend(3_000_000)
    plan = WorkerPlan(0, 1, str(tmp_path), TargetSettings("grpc://x:1"), Load(num_warmups=0))
    worker = Worker(plan, trace, target, target.clock, target)  # type: ignore[arg-type]
    await worker.prepare()
    done = await worker.run(0)
    assert done["released"] == 100
    assert worker.progress()["statuses"] == {"ok": 100}
    lags_ms = sorted(worker._ledger._recent["lag_ms"])
    assert lags_ms[-1] == pytest.approx(latest_ms)


class Broken(SlowToSend):
    """A target with a defect: it can't encode the third prompt."""

    encoded = 0

    def encode(self, prompt: Prompt, output_tokens: int) -> bytes:
        self.encoded += 1
        if self.encoded == 3:
            raise ZeroDivisionError("the third prompt")
        return b"x"

    def begin(self, payload: bytes, sink: Sink) -> Call:
        sink.released()
        return self  # and no answer ever comes


@pytest.mark.parametrize("ahead_ms", [0, 1e6])
async def test_a_defect_ends_the_run(trace_of: TraceOf, tmp_path: Any, ahead_ms: float) -> None:
    """Raised by a release, and by encoding ahead of one that is far away."""
    trace = trace_of([1] * 5, np.array([0, 0, *[ahead_ms / 1e3] * 3]))
    target = Broken(0)
    timer = make_timer()
    plan = WorkerPlan(0, 1, str(tmp_path), TargetSettings("grpc://x:1"), Load(num_warmups=0))
    worker = Worker(plan, trace, target, time.monotonic_ns, timer)
    worker._payloads._budget = 1
    await worker.prepare()
    with pytest.raises(ZeroDivisionError, match="third prompt"):
        await asyncio.wait_for(worker.run(time.monotonic_ns()), 60)
    assert target.encoded >= 3
    timer.close()


@APIS
async def test_timeouts_are_failures_with_a_reason(
    run_echo: RunEcho, trace_of: TraceOf, api: str
) -> None:
    script = Script((Step(0.0, 1), Step(3600.0, 1)))
    result, seen = await run_echo(
        trace_of([2, 2]), lambda _: script, api, virtual=False, request_timeout_s=0.2
    )
    assert result.summary["by_status"]["timeout"] == 2
    assert list(result.summary["errors"]) == ["timeout: no end within 0.2 s"]
    assert result.summary["slo"]["attained_ratio"] == 0
    await until(lambda: seen.cancelled == 2)


@APIS
async def test_deliberate_cancellations_are_no_failures(
    run_echo: RunEcho, trace_of: TraceOf, api: str
) -> None:
    script = Script((Step(0.0, 1), Step(3600.0, 1)))
    result, seen = await run_echo(
        trace_of([2, 2]), lambda _: script, api, virtual=False, cancel_rate=1.0, cancel_after_s=0.1
    )
    assert result.summary["by_status"]["cancelled"] == 2
    assert result.summary["scheduled"] == result.summary["failed"] == 0
    await until(lambda: seen.cancelled == 2)


async def test_idle_connections_that_the_server_gives_up_are_replaced(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    """Stale keep-alive connections count as server errors elsewhere."""
    result, _ = await run_echo(
        trace_of([2] * 3), lambda _: QUICK, "http", virtual=False, max_concurrency=1,
        drop=lambda connection, request: request > 0,
    )  # fmt: skip
    assert result.summary["completed"] == 3
    assert result.summary["client"]["retries"] >= 1


async def test_a_server_that_always_hangs_up_is_not_asked_for_ever(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    result, seen = await run_echo(
        trace_of([2]), lambda _: QUICK, "http", virtual=False, drop=lambda *_: True
    )
    (message,) = result.summary["errors"]
    assert "closed the connection before its response" in message
    assert seen.connections <= 2 + 2 * SPARE


async def test_an_interrupted_run_keeps_what_was_measured(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    def plan(received: Received) -> Script:
        return QUICK if received.number == 0 else Script((Step(3600.0),))

    def stop(worker: Worker) -> bool:
        done = worker.progress()["statuses"].get("ok") == 1
        if done:
            worker.stop(interrupt=True)
        return done

    trace = trace_of([2, 2, 2], [0.0, 0.0, 3600.0])
    result, _ = await run_echo(trace, plan, "http", virtual=False, stop=stop, connections=2)
    assert result.summary["completed"] == 1
    assert result.summary["by_status"]["interrupted"] == 1
    assert result.summary["not_released"] == 1
    assert result.summary["scheduled"] == 1


async def test_nothing_that_was_held_back_is_sent_after_a_stop(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    """Even where what is open may drain: stopping must not go on sending one after the other."""
    at_work, go_on = asyncio.Event(), asyncio.Event()

    class Patient:
        async def pause(self, seconds: float) -> None:
            at_work.set()
            await go_on.wait()

        async def written(self) -> None: ...

    def stop(worker: Worker) -> bool:
        if not at_work.is_set() or worker.progress()["released"] < 3:
            return False
        worker.stop(interrupt=False)
        go_on.set()
        return True

    result, seen = await run_echo(
        trace_of([2] * 3), lambda _: QUICK, "http", virtual=False, server_time=Patient(),
        max_concurrency=1, stop=stop,
    )  # fmt: skip
    assert seen.requests == 1
    assert result.summary["by_status"]["ok"] == 1
    assert result.summary["by_status"]["interrupted"] == 2


async def test_garbage_collection_is_off_while_it_matters(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    import gc

    states = []

    def plan(received: Received) -> Script:
        states.append(gc.isenabled())
        return QUICK

    await run_echo(trace_of([2]), plan, "http")
    assert states == [False]
    assert gc.isenabled()


def test_failures_are_infinite_not_missing() -> None:
    """Interpolation gives NaN beside +inf, and leaving failures out flatters a failing server."""
    values = distribution(np.arange(1.0, 96.0), failures=5)
    assert values["p95"] == 95  # p95 <= x exactly where 95% are
    assert math.isinf(values["p99"])
    assert values["completed_max"] == 95
    assert math.isinf(distribution(np.arange(1.0, 95.0), failures=6)["p95"])


@APIS
@pytest.mark.parametrize("rest", [1, 4])
async def test_itl_of_a_chunk_does_not_depend_on_how_tokens_are_batched(
    run_echo: RunEcho, trace_of: TraceOf, api: str, rest: int
) -> None:
    """8.7 ms were reported where 3.4 were true."""
    steps = [Step(5.0, 1), *[Step(0.01 * rest, rest)] * (20 // rest)]
    result, _ = await run_echo(trace_of([21]), lambda _: Script(tuple(steps)), api)
    assert result.summary["itl_ms"]["p50"] == pytest.approx(10, abs=1e-3)
    assert result.summary["itl_ms"]["count"] == 20
    assert result.summary["itl_ms"]["max"] == pytest.approx(10, abs=1e-3)


async def test_requests_say_what_they_should(run_echo: RunEcho, trace_of: TraceOf) -> None:
    import json

    _, seen = await run_echo(trace_of([5], inputs=11), lambda _: Script((Step(0.1, 5),)), "http")
    body = json.loads(seen.bodies[0])
    assert len(body["prompt"]) == 11
    assert body["max_tokens"] == 5
    assert body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


async def test_warm_up_is_not_measured_and_not_repeated(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    result, seen = await run_echo(trace_of([2, 2]), lambda _: QUICK, "http", virtual=False,
                                  num_warmups=3)  # fmt: skip
    assert seen.requests == 5
    assert len(set(seen.bodies)) == 5
    assert result.summary["scheduled"] == 2
