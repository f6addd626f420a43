"""`tknp-load` as its users run it: processes, files, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from click.testing import CliRunner

from tknp.cli.main import main as tknp
from tknp_loadgen.cli.main import main
from tknp_loadgen.errors import Exit
from tknp_loadgen.measure.result import read_result

pytestmark = pytest.mark.timeout(240)
COMMAND = [sys.executable, "-m", "tknp_loadgen.cli.main"]
ANY_LAG = ("--max-lag-ms", "1e9")  # a slow machine is no failure here


@pytest.fixture(scope="module")
def echo() -> Iterator[dict[str, str]]:
    """Targets of a running echo server: 20 ms to the first token, 1 ms a token, two at a time."""
    process = subprocess.Popen(
        [*COMMAND, "echo", "--ttft-ms", "20", "--itl-ms", "1", "--tokens-per-chunk", "2"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    ports = json.loads(process.stdout.readline())
    yield {"http": f"http://{ports['http']}/v1", "grpc": f"grpc://{ports['grpc']}"}
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs `tknp-load ARGUMENTS` in a directory of its own; its workers are processes."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(main, arguments)
        assert done.exit_code == code, done.output
        return done

    return call


def gen(load: Callable[..., Any], *more: str) -> None:
    load("gen", "--request-rate", "100", "--num-prompts", "40", "--input-tokens", "50",
         "--output-tokens", "9", "--seed", "7", "--output", "t.jsonl", *more)  # fmt: skip


def run(load: Callable[..., Any], url: str, *more: str, code: int = 0) -> Any:
    return load("run", "--trace", "t.jsonl", "--target", url, "--model", "m", "--output", "out",
                "--no-report", *more, code=code)  # fmt: skip


@pytest.mark.parametrize("api", ["http", "grpc"])
def test_a_run_leaves_everything_it_should(
    echo: dict[str, str], load: Callable[..., Any], tmp_path: Path, api: str
) -> None:
    gen(load)
    said = run(load, echo[api], "--processes", "2", "--goodput", "ntpot:60000 ttft:60000",
               "--json", *ANY_LAG)  # fmt: skip
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert json.loads(said.stdout) == summary
    for key in ("ttft_ms", "tpot_ms", "itl_ms", "completion_s", "normalized_latency_ms_per_token",
                "client_lag_ms"):  # fmt: skip
        assert {"mean", "p50", "p90", "p95", "p99", "max"} <= set(summary[key]), key
    assert summary["scheduled"] == summary["completed"] == 40
    assert summary["valid"] is True
    assert summary["failed"] == summary["prompt_length_mismatches"] == 0
    assert summary["completed_tokens"] == 360
    assert summary["completion_throughput_tokens_per_s"] > 0
    assert summary["slo"]["attained_ratio"] == 1.0
    assert summary["slo"]["ci_low"] < 1.0 == summary["slo"]["ci_high"]
    assert summary["ttft_ms"]["p50"] >= 20  # the server's own delay is a lower bound
    assert summary["completion_s"]["p50"] >= 0.028
    assert sum(worker["released"] for worker in summary["client"]["workers"]) == 40
    load("validate", "t.jsonl", "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.yaml", "trace.jsonl", "summary.json", "summary.csv", "requests.0.jsonl",
            "requests.1.jsonl", "tokens.0.bin", "tokens.1.bin"} <= names  # fmt: skip


def test_server_counters_are_of_the_run_alone(
    echo: dict[str, str], load: Callable[..., Any], tmp_path: Path
) -> None:
    """Scraped before and after; what warm-up added is left out."""
    scrapes = count()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f"# TYPE r counter\nr_total {10 * next(scrapes)}\n".encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        gen(load)
        run(load, echo["http"], "--metrics-url", url, "--metrics-interval-s", "3600", *ANY_LAG)
        server.shutdown()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["server"][url]["scrapes"] == 3
    assert summary["server"][url]["counters"] == {"r_total": 10}
    lines = (tmp_path / "out" / "server_metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["at_s"] for line in lines]
    assert times == sorted(times)
    assert times[1] <= 0 < times[2]
    unreachable = run(load, echo["http"], "--metrics-url", "http://127.0.0.1:9/", code=Exit.FAILED)
    assert "can't be scraped" in unreachable.stderr


def test_exit_codes_say_what_happened(
    echo: dict[str, str], load: Callable[..., Any], tmp_path: Path
) -> None:
    gen(load)
    url = echo["grpc"]
    run(load, url, "--goodput", "ntpot:0.001", *ANY_LAG, code=Exit.SLO_MISSED)
    invalid = run(load, url, "--max-lag-ms", "1e-9", code=Exit.INVALID_RUN)
    assert "INVALID" in invalid.stdout
    past = run(load, url, "--start-at", "1", code=Exit.BAD_INPUT)
    assert "start_at=1.0: passed" in past.stderr
    run(load, url, "--request-timeout", "0.001", *ANY_LAG, code=Exit.TOO_MANY_ERRORS)
    assert "--max-concurrency" in run(load, url, "--max-concurrency", "2", "--processes", "2",
                                      code=Exit.BAD_INPUT).stderr  # fmt: skip
    assert "must be grpc://" in run(load, "127.0.0.1:1", code=Exit.BAD_INPUT).stderr
    nobody = run(load, "http://127.0.0.1:9/v1", code=Exit.FAILED)
    assert "no server answers at 127.0.0.1:9" in nobody.stderr
    (tmp_path / "t.jsonl").write_text("{}\n")
    assert "t.jsonl:1: no trace header" in run(load, url, code=Exit.BAD_INPUT).stderr
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("irreplaceable")
    gen(load)
    load("run", "--trace", "t.jsonl", "--target", url, "--output", "mine", code=Exit.BAD_INPUT)
    assert "1 process(es)" in run(load, url, "--dry-run").stdout


def test_ctrl_c_keeps_what_was_measured(echo: dict[str, str], tmp_path: Path) -> None:
    runner = CliRunner()
    trace = str(tmp_path / "t.jsonl")
    done = runner.invoke(tknp, ["load", "gen", "--arrivals", "burst-train", "--burst-size", "2",
                                "--burst-interval-s", "3600", "--num-prompts", "4",
                                "--output-tokens", "9", "--output", trace])  # fmt: skip
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*COMMAND, "run", "--trace", trace, "--target", echo["http"], "--model", "m",
         "--output", str(out), "--no-report"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    records = out / "requests.0.jsonl"
    while not records.exists() or records.read_text().count("\n") < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == Exit.INTERRUPTED, stderr
    summary = read_result(out).summary
    assert (summary["completed"], summary["not_released"]) == (2, 2)
    assert summary["stopped"] == "interrupted"
    assert "stopped: interrupted" in stdout


def test_a_saturated_server_ends_a_run_long_before_its_trace(
    echo: dict[str, str], load: Callable[..., Any], tmp_path: Path
) -> None:
    """An hour's schedule: 60 requests miss the SLO at once, the others would come much later."""
    gen(load, "--arrivals", "piecewise", "--rates", "60:1,0.01:3600", "--num-prompts", "70")
    said = run(load, echo["http"], "--goodput", "ntpot:0.001", "--until-saturated", *ANY_LAG,
               code=Exit.SLO_MISSED)  # fmt: skip
    assert "stopped: saturated" in said.stdout
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stopped"] == "saturated"
    assert summary["completed"] >= 50
    assert summary["not_released"] >= 5
    assert summary["scheduled"] + summary["not_released"] == 70


def test_a_sweep_searches_and_reports(
    echo: dict[str, str], load: Callable[..., Any], tmp_path: Path
) -> None:
    """An SLO that nobody can keep: the lowest rate decides."""
    done = load("sweep", "--search", "50:200", "--num-prompts", "40", "--output-tokens", "3",
                "--target", echo["grpc"], "--goodput", "ntpot:0.001", "--output", "sweep",
                *ANY_LAG)  # fmt: skip
    assert "Not even 50 requests/s keep the SLO." in done.stdout
    said = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert said["search"]["highest_rate_met_per_s"] is None
    assert said["search"]["lowest_rate_missed_per_s"] == 50
    assert [run["name"] for run in said["runs"]] == ["rate-50"]
    assert "<svg" in (tmp_path / "sweep" / "report.html").read_text()


@pytest.mark.parametrize("sliced", ["0/2", "1/2"])
def test_a_slice_is_its_share_of_the_schedule(
    echo: dict[str, str], load: Callable[..., Any], tmp_path: Path, sliced: str
) -> None:
    gen(load)
    run(load, echo["http"], "--slice", sliced, *ANY_LAG)
    columns = read_result(tmp_path / "out").columns
    assert columns.row.tolist() == list(range(int(sliced[0]), 40, 2))
