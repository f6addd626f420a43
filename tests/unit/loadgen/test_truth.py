"""Every metric against an echo server that knows the truth, on a clock that only it moves."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from tknp_loadgen.echo.script import Received, Script, Step

RunEcho = Callable[..., Any]
TraceOf = Callable[..., Any]
APIS = pytest.mark.parametrize("api", ["http", "chat", "grpc"])
STEPS = (Step(0.5, 1), Step(0.1, 3), Step(0.25, 0), Step(1.75, 2), Step(0.05, 1))
SCRIPT = Script(STEPS, headers_pause_s=1.0, end_pause_s=0.7)


def trace_for(trace_of: TraceOf, api: str, *arguments: Any, **options: Any) -> Any:
    """Chat takes text."""
    trace = trace_of(*arguments, **options)
    if api == "chat":
        object.__setattr__(trace, "prompts", {
            "kind": "text", "words": [" a", " b", " c"], "added_tokens": 0})  # fmt: skip
    return trace


@APIS
async def test_one_request(run_echo: RunEcho, trace_of: TraceOf, api: str, tmp_path: Path) -> None:
    trace = trace_for(trace_of, api, [7])
    result, _ = await run_echo(trace, lambda _: SCRIPT, api)
    summary = result.summary
    assert summary["completed"] == summary["scheduled"] == 1

    def value(name: str) -> float:
        assert summary[name]["mean"] == pytest.approx(summary[name]["p50"], abs=1e-9)
        return float(summary[name]["p99"])

    assert value("ttft_ms") == pytest.approx(1500, abs=1e-6)
    # 6 tokens after the first chunk; a peer divides by all 7 and starts at the request
    assert value("tpot_ms") == pytest.approx(2150 / 6, abs=1e-6)
    assert value("max_stall_ms") == pytest.approx(2000, abs=1e-6)
    # the last token ends it: not the finish reason, usage or [DONE] 0.7 s later
    assert value("completion_s") == pytest.approx(3.65, abs=1e-9)
    assert value("normalized_latency_ms_per_token") == pytest.approx(3650 / 7, abs=1e-6)
    assert value("stream_close_ms") == pytest.approx(700, abs=1e-6)
    assert summary["completion_throughput_tokens_per_s"] == pytest.approx(7 / 3.65)
    itl, icl = summary["itl_ms"], summary["icl_ms"]
    # tokens: 3 at 100/3 ms, 2 at 1000 ms, 1 at 50 ms; TTFT is none of them; none is 0
    assert itl["count"] == 6
    assert itl["mean"] == pytest.approx(2150 / 6, abs=1e-3)
    assert itl["p50"] == pytest.approx(100 / 3, abs=1e-3)
    assert itl["p90"] == itl["max"] == pytest.approx(1000)
    assert (icl["count"], icl["p50"], icl["max"]) == (3, 100, 2000)
    assert summary["client_lag_ms"]["max"] == 0
    assert summary["valid"]
    assert json.loads((result.directory / "summary.json").read_text())["completed"] == 1


@APIS
async def test_time_zero_is_the_scheduled_arrival(
    run_echo: RunEcho, trace_of: TraceOf, api: str
) -> None:
    """With one request at a time the second waits in the client, and that wait counts.

    Peers start their clocks after the semaphore: a reported p99 of 507 ms was truly 3,330.
    """
    trace = trace_for(trace_of, api, [7, 7])
    result, seen = await run_echo(trace, lambda _: SCRIPT, api, max_concurrency=1)
    second = 2 * 3.65 + 0.7
    assert result.summary["completion_s"]["max"] == pytest.approx(second, abs=1e-9)
    assert result.summary["ttft_ms"]["max"] == pytest.approx((4.35 + 1.5) * 1e3, abs=1e-6)
    assert result.summary["ttft_from_send_ms"]["max"] == pytest.approx(1500, abs=1e-6)
    assert result.summary["client_lag_ms"]["max"] == 0  # the client did what it was told
    assert seen.most_open == 1
    assert result.summary["completion_throughput_tokens_per_s"] == pytest.approx(14 / 8.0)


@APIS
@pytest.mark.parametrize(
    ("script", "status", "reason"),
    [
        (Script(()), "empty", "no token"),
        (Script((Step(0.1),)), "wrong_length", "1 tokens came, 7 were asked for"),
        (Script((Step(0.1, 7), Step(0.1))), "wrong_length", "8 tokens came"),
        (Script((Step(0.1, 7),), told_tokens=6), "wrong_length", "6 tokens came"),
        (Script((Step(0.1, 7),), error="out of memory"), "error", "out of memory"),
        (Script((Step(0.1, 7),), cut=True), "error", "without a finish reason"),
        (Script((Step(0.1, 3),), cut=True), "error", "without a finish reason"),
    ],
)
async def test_what_does_not_end_well_is_a_failure(
    run_echo: RunEcho, trace_of: TraceOf, api: str, script: Script, status: str, reason: str
) -> None:
    """An empty stream with status 200 counts as a success with TTFT 0 elsewhere."""
    if api == "grpc" and script.told_tokens:
        pytest.skip("the server's count and its ids agree")
    trace = trace_for(trace_of, api, [7, 7])
    good = Script((Step(0.1, 7),))
    result, _ = await run_echo(
        trace,
        lambda r: script if r.number else good,
        api,
        goodput=("ntpot:1000",),
        max_concurrency=1,
    )
    summary = result.summary
    assert summary["by_status"][status] == 1
    (message,) = summary["errors"]
    assert message.startswith(f"{status}: ")
    assert reason in message
    assert summary["slo"]["attained_ratio"] == 0.5
    assert math.isinf(summary["completion_s"]["p99"])
    assert math.isinf(summary["ttft_ms"]["p95"])
    assert summary["completion_s"]["p50"] == pytest.approx(0.1)
    assert summary["completion_s"]["completed_max"] == pytest.approx(0.1)
    # tokens of the failed request count as received, not as completed
    assert summary["completed_tokens"] == 7


@APIS
@pytest.mark.parametrize("reason", ["queue full", ""])
async def test_refusals_say_why(
    run_echo: RunEcho, trace_of: TraceOf, api: str, reason: str
) -> None:
    """Blank errors hide timeouts elsewhere."""
    code = 8 if api == "grpc" else 429
    trace = trace_for(trace_of, api, [7])
    result, _ = await run_echo(trace, lambda _: Script(refusal=(code, reason)), api)
    (message,) = result.summary["errors"]
    assert ("RESOURCE_EXHAUSTED" if api == "grpc" else "HTTP 429") in message
    assert (reason or "no reason given") in message
    assert result.summary["error_ratio"] == 1.0


@APIS
async def test_a_server_that_still_loads_is_asked_until_it_answers(
    run_echo: RunEcho, trace_of: TraceOf, api: str
) -> None:
    """Users start a pool and a test one after the other; what is measured begins afterwards."""
    loading = Script(refusal=(14 if api == "grpc" else 503, "loading"))
    scripts = chain((loading, loading), repeat(Script((Step(0.1, 7),))))
    result, seen = await run_echo(
        trace_for(trace_of, api, [7]), lambda _: next(scripts), api, num_warmups=1, virtual=False
    )
    assert result.summary["completed"] == result.summary["scheduled"] == 1
    assert seen.requests == 4  # two refused, the warm-up, the run


@APIS
async def test_one_chunk_has_no_tpot(run_echo: RunEcho, trace_of: TraceOf, api: str) -> None:
    """A TPOT of 0 would pass any SLO; here the other bounds decide."""
    trace = trace_for(trace_of, api, [5])
    result, _ = await run_echo(
        trace, lambda _: Script((Step(2.0, 5),)), api, goodput=("tpot:1", "ttft:1000")
    )
    assert result.summary["tpot_ms"]["mean"] is None
    assert result.summary["itl_ms"]["count"] == 0
    assert result.summary["slo"]["good"] == 0
    slow = await run_echo(
        trace, lambda _: Script((Step(2.0, 5),)), api, goodput=("tpot:1", "ttft:2000")
    )
    assert slow[0].summary["slo"]["good"] == 1


async def test_chunk_sizes_are_shared_out_where_the_server_does_not_tell(
    run_echo: RunEcho, trace_of: TraceOf
) -> None:
    """Only the count at the end is known: 8 tokens in 4 chunks, so 2 in each."""
    script = Script((Step(1.0, 2), Step(0.2, 2), Step(0.4, 2), Step(0.6, 2)))
    result, _ = await run_echo(trace_of([8]), lambda _: script, "http", chunk_usage=False)
    summary = result.summary
    assert summary["completed"] == 1
    assert summary["tpot_ms"]["mean"] == pytest.approx(1200 / 6)
    assert summary["itl_ms"]["p50"] == pytest.approx(200)
    assert summary["itl_ms"]["count"] == 6
    assert summary["estimated_chunk_sizes"] == 1
    assert any("equal chunks" in warning for warning in summary["warnings"])


@APIS
async def test_an_answer_may_stop_early_only_where_that_is_allowed(
    run_echo: RunEcho, trace_of: TraceOf, api: str
) -> None:
    stopped = Script((Step(0.1), Step(0.1)), finish="stop")
    trace = trace_for(trace_of, api, [7])
    strict, _ = await run_echo(trace, lambda _: stopped, api)
    assert strict.summary["by_status"]["wrong_length"] == 1
    free, _ = await run_echo(trace, lambda _: stopped, api, any_length=True, ignore_eos=False)
    assert free.summary["completed"] == 1
    assert free.summary["normalized_latency_ms_per_token"]["mean"] == pytest.approx(100)


async def test_the_server_tells_its_queue(run_echo: RunEcho, trace_of: TraceOf) -> None:
    result, _ = await run_echo(trace_of([7]), lambda _: SCRIPT, "grpc")
    assert result.summary["queue_wait_ms"]["mean"] == pytest.approx(1000)


async def test_other_prompt_lengths_are_noticed(run_echo: RunEcho, trace_of: TraceOf) -> None:
    result, _ = await run_echo(trace_of([7], inputs=40), lambda _: SCRIPT, "http")
    assert result.summary["prompt_length_mismatches"] == 0

    def plan(received: Received) -> Script:
        assert received.prompt_tokens == 40
        return SCRIPT

    await run_echo(trace_of([7], inputs=40), plan, "grpc")


async def test_a_closed_loop_thinks_between_answers(run_echo: RunEcho, trace_of: TraceOf) -> None:
    """The next request is due when the last one has ended and the pause is over."""
    extras = ({"user": 0, "think_s": 0.0}, {"user": 0, "think_s": 2.0})
    trace = trace_of([7, 7], generator={"arrivals": {"kind": "closed", "users": 1}}, extras=extras)
    result, _ = await run_echo(trace, lambda _: SCRIPT, "http")
    assert result.columns["scheduled_s"].tolist() == pytest.approx([0.0, 4.35 + 2.0])
    assert result.summary["completion_s"]["max"] == pytest.approx(3.65)
