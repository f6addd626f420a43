"""What the load generator itself can do, against its own echo server in another process.

    python bench/loadgen.py            lag, burst, chunks a second, memory, a table
    python bench/loadgen.py --json
    python bench/loadgen.py --seconds 5      lag over 5 s instead of 60

    lag       Poisson arrivals at 1,000/s of one-token requests: how late they leave, and the rate
    burst     128 prompts of 32,898 ids released together: first to last
    chunks    what a chunk costs the client's core: seconds of CPU over chunks received
    memory    growth of the worker a request of 1,024 tokens in chunks of 8, over 2,000 requests
    beside    GuideLLM, if found, on the same arrivals: lag and CPU a request as ratios

Each is measured over HTTP and gRPC, by one worker process. The server has the last core to itself,
as a server has a machine, and all clients share the others; how much of its core it used is a row,
because a server that can't keep up delays its client. On a busy machine lag is the scheduler's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.options import finish, parser, tries
from harness.peer_guidellm import GuideLlm
from harness.peers import Absent
from harness.report import Row, Target, note

from tknp_loadgen.run.settings import RunSettings
from tknp_loadgen.run.supervisor import supervise
from tknp_loadgen.target.factory import TargetSettings
from tknp_loadgen.trace.arrivals import Arrivals
from tknp_loadgen.trace.build import Settings, build
from tknp_loadgen.trace.format import Trace
from tknp_loadgen.trace.lengths import Lengths

RATE = 1000.0
APIS = ("http", "grpc")
ALL_CORES = os.sched_getaffinity(0)


def cores() -> tuple[set[int], set[int]]:
    """Those of clients, and that of the server: the same one where there is only one."""
    *ours, last = sorted(ALL_CORES)
    return set(ours or [last]), {last}


def processor_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def echo(ttft_ms: float, itl_ms: float, tokens: int = 1) -> Iterator[Mapping[str, str]]:
    """Targets of an echo server by API, and its process under "pid". `tokens`: of a chunk."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tknp_loadgen.cli.main", "echo", "--ttft-ms", str(ttft_ms),
         "--itl-ms", str(itl_ms), "--tokens-per-chunk", str(tokens)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        os.sched_setaffinity(process.pid, cores()[1])
        if process.stdout is None:
            raise RuntimeError("the echo server has no output")
        ports = json.loads(process.stdout.readline())
        yield {
            "http": f"http://{ports['http']}/v1",
            "grpc": f"grpc://{ports['grpc']}",
            "pid": str(process.pid),
        }
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def trace(arrivals: Arrivals, count: int, inputs: int, outputs: int) -> Trace:
    lengths = Lengths(input_tokens=inputs, output_tokens=outputs)
    return build(Settings(arrivals, lengths, num_prompts=count, seed=7))


def run(made: Trace, url: str) -> Mapping[str, Any]:
    """Summary of one run."""
    with tempfile.TemporaryDirectory() as directory:
        settings = RunSettings(TargetSettings(url, "echo"), Path(directory) / "run")
        summary = asyncio.run(supervise(made, settings)).result.summary
    if summary["failed"]:
        raise RuntimeError(f"the echo server failed: {summary['errors']}")
    return summary


def lag(url: str, api: str, seconds: float, server: int) -> list[Row]:
    made = trace(Arrivals("poisson", rate=RATE), round(RATE * seconds), 16, 1)
    before_s = processor_s(server)
    summary = run(made, url)
    server_s = processor_s(server) - before_s
    values = summary["client_lag_ms"]
    (worker,) = summary["client"]["workers"]
    name = f"{api}: {RATE:.0f} requests/s"
    return [
        Row(f"{name}, lag p50", values["p50"], "ms", target=Target("ours", most=0.1)),
        Row(f"{name}, lag p99", values["p99"], "ms", target=Target("ours", most=1.0)),
        Row(f"{name}, rate error", summary["rate_error_ratio"], "",
            target=Target("ours", most=0.001)),
        Row(f"{name}, CPU a request", worker["cpu_ratio"] / RATE * 1e6, "us"),
        Row(f"{name}, share of the server's core", server_s / worker["wall_s"], ""),
    ]  # fmt: skip


def beside(url: str, rate: float, seconds: float) -> list[Row]:
    """Ours and GuideLLM on one Poisson schedule, one after the other."""
    made = trace(Arrivals("poisson", rate=rate), round(rate * seconds), 16, 1)
    with tempfile.TemporaryDirectory() as directory:
        try:
            peer = GuideLlm(Path(directory))
            note(f"{peer.name} at {rate:.0f} requests/s")
            theirs = peer.measure(url, [int(us) / 1e6 for us in made.arrival_us], 16, 1)
        except (Absent, subprocess.SubprocessError) as error:
            note(f"GuideLLM is left out: {error}")
            return []
    summary = run(made, url)
    (worker,) = summary["client"]["workers"]
    ours, name = summary["client_lag_ms"], f"beside {peer.name}, {rate:.0f} requests/s"
    return [
        *(Row(f"{name}, lag p{percent}", ours[f"p{percent}"], "ms", theirs.percentile(percent))
          for percent in (50, 99)),
        Row(f"{name}, CPU a request", worker["cpu_ratio"] / rate * 1e6, "us", theirs.cpu_s * 1e6),
    ]  # fmt: skip


def burst(url: str, api: str) -> list[Row]:
    summary = run(trace(Arrivals("burst"), 128, 32_898, 4), url)
    spread = summary["client_lag_ms"]["burst_spread"]
    return [Row(f"{api}: burst of 128 x 32,898 ids, spread", spread, "ms",
                target=Target("ours", most=20.0))]  # fmt: skip


def chunks(url: str, api: str, count: int) -> list[Row]:
    summary = run(trace(Arrivals("constant", rate=50), count, 16, 256), url)
    (worker,) = summary["client"]["workers"]
    cost_us = worker["cpu_ratio"] * worker["wall_s"] * 1e6 / summary["completed_tokens"]
    return [
        Row(f"{api}: CPU a chunk", cost_us, "us"),
        Row(f"{api}: chunks/s a core", 1e6 / cost_us, "/s", target=Target("ours", least=10_000)),
    ]


def memory(url: str, api: str) -> list[Row]:
    small = run(trace(Arrivals("constant", rate=200), 20, 16, 1024), url)
    large = run(trace(Arrivals("constant", rate=200), 2020, 16, 1024), url)
    used = [s["client"]["workers"][0]["max_rss_bytes"] for s in (small, large)]
    return [Row(f"{api}: memory a request of 1,024 tokens", (used[1] - used[0]) / 2000 / 1024,
                "KiB", target=Target("ours", most=3.0))]  # fmt: skip


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--seconds", type=float, help="of the measurement of lag (60; 5 if --quick)")
    options = flags.parse_args()
    os.sched_setaffinity(0, cores()[0])
    rows = []
    seconds = options.seconds or (5.0 if options.quick else 60.0)
    for attempt in range(tries(options, 1)):
        for api in APIS:
            note(f"{api}, try {attempt + 1}")
            with echo(1.0, 0.0) as targets:
                rows += lag(targets[api], api, seconds, int(targets["pid"]))
                rows += burst(targets[api], api)
                if api == "http":
                    for rate in (50.0, 300.0):
                        rows += beside(targets[api], rate, min(seconds, 10.0))
            with echo(5.0, 5.0) as targets:
                rows += chunks(targets[api], api, 50 if options.quick else 200)
            if not options.quick:
                with echo(5.0, 0.0, tokens=8) as targets:
                    rows += memory(targets[api], api)
    finish("Load generator", rows, options)


if __name__ == "__main__":
    main()
