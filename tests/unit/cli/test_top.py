"""`tknp top`: what it computes, draws and does at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from tknp.cli.main import main
from tknp.cli.top import Watched
from tknp.cli.top_figures import GENERATED, TTFT, History, Look, Scrape, quantile
from tknp.cli.top_metrics import MetricsReader, parsed
from tknp.cli.top_view import frame, tick_line
from tknp.client import Client
from tknp.v1.coordinator_pb2 import Status, StreamStatus

INF = float("inf")
TEXT = """\
# TYPE tknp_generation_tokens_total counter
tknp_generation_tokens_total {tokens}
# TYPE tknp_time_to_first_token_seconds histogram
tknp_time_to_first_token_seconds_bucket{{le="0.5"}} {half}
tknp_time_to_first_token_seconds_bucket{{le="1.0"}} {all}
tknp_time_to_first_token_seconds_bucket{{le="+Inf"}} {all}
tknp_time_to_first_token_seconds_count {all}
tknp_time_to_first_token_seconds_sum 1
"""


def look(at_s: float, steps: int = 0, scrape: Scrape | None = None, **status: Any) -> Look:
    streams = [StreamStatus(stream=0, running=3, steps=steps)]
    return Look(at_s, Status(steps=steps, uptime_s=at_s, streams=streams, **status), scrape)


def scrape(tokens: float, half: float, whole: float) -> Scrape:
    return Scrape({GENERATED: tokens}, {TTFT: {0.5: half, 1.0: whole, INF: whole}})


def history(*looks: Look) -> History:
    made = History()
    for one in looks:
        made.add(one)
    return made


@pytest.mark.parametrize(
    ("q", "counts", "expected"),
    [
        (0.5, {1.0: 10, INF: 10}, 0.5),
        (0.5, {1.0: 5, 2.0: 10, INF: 10}, 1.0),
        (0.75, {1.0: 5, 2.0: 10, INF: 10}, 1.5),
        (0.99, {1.0: 0, 2.0: 100, INF: 100}, 1.99),
        (0.99, {1.0: 1, INF: 100}, 1.0),  # above the last bound: that bound, as Prometheus has it
        (0.5, {1.0: 0, INF: 0}, None),
        (0.5, {}, None),
    ],
)
def test_quantiles(q: float, counts: dict[float, float], expected: float | None) -> None:
    assert quantile(q, counts) == (None if expected is None else pytest.approx(expected))


def test_tokens_are_counted_where_metrics_are() -> None:
    figures = history(
        look(0, 0, scrape(100, 10, 10)), look(10, 20, scrape(200, 10, 10)),
        look(12, 30, scrape(300, 15, 20)),
    ).figures()  # fmt: skip
    assert (figures.output_tokens_per_s, figures.estimated) == (50, False)
    assert (figures.steps_per_s, figures.window_s) == (5, 12)
    assert figures.ttft_s == (pytest.approx(0.5), pytest.approx(0.99))
    assert figures.itl_s is None


def test_tokens_are_estimated_from_steps_elsewhere() -> None:
    figures = history(look(0, 0), look(2, 10)).figures()
    assert (figures.output_tokens_per_s, figures.estimated) == (15, True)
    assert (figures.prompt_tokens_per_s, figures.ttft_s) == (None, None)


def test_a_pool_that_began_anew_has_no_past() -> None:
    again = look(6, 2, epoch=2)
    assert history(look(0, 50), look(5, 99), again).looks[0] is again
    assert history(look(0, 50), look(5, 99), again).figures().output_tokens_per_s is None


def test_a_minute_is_kept_and_the_look_before_it() -> None:
    made = history(*(look(float(second), second) for second in range(200)))
    assert made.looks[0].at_s == 139
    assert made.figures().window_s == 60


def test_bars() -> None:
    assert tick_line([0, 5, 10], 10) == "▁▅█"
    assert tick_line([1, 0, 5, 10], 2) == "▅█"
    assert tick_line([0, 0], 5) == "▁▁"
    assert tick_line([], 5) == ""


@pytest.mark.parametrize("width", [80, 120, 200])
def test_a_frame_fits_and_names_everything(fake_pool: Any, width: int) -> None:
    status = fake_pool.status
    status.nodes[1].progress.phase = 1
    for stream in range(2):
        status.streams.add(stream=stream, running=1).roots.add(layer_stop=30)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(frame(history(Look(0.0, status), Look(1.0, status)), width, "no answer"))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    for fact in (
        "● tiny", "ready · float32 · TKNP · 2 nodes x TP 1", "embedding, layers 0-14", "90%",
        "12.3 ms", "loading weights", "prefill 0", "prompts, grpc", "2 running", "0 waiting",
        "5 completed", "up 1h 2m", "~0.0 tokens/s", "node 0: 0-29", "no answer",
    ):  # fmt: skip
        assert fact in text
    assert ("5,000 / 6,336" in text) == (width > 80)


class Metrics(HTTPServer):
    """Answers every scrape with ten more tokens."""

    tokens = 0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.address = f"127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        assert isinstance(server, Metrics)
        server.tokens += 10
        n = server.tokens
        self.send_response(200)
        self.end_headers()
        self.wfile.write(TEXT.format(tokens=n, half=n // 2, all=n).encode())

    def log_message(self, format: str, *args: Any) -> None:
        return


@pytest.fixture
def metrics() -> Iterator[Metrics]:
    server = Metrics()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def top(fake_pool: Any, *arguments: str) -> Any:
    command = ["top", "--target", fake_pool.target, "--interval", "0.1", *arguments]
    return CliRunner().invoke(main, command)


def test_once_prints_one_frame(fake_pool: Any, metrics: Metrics) -> None:
    result = top(fake_pool, "--once", "--metrics", metrics.address)
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "500.0 ms p50  990.0 ms p99" in result.stdout
    assert "\x1b" not in result.stdout


def test_json_has_figures_and_status(fake_pool: Any, metrics: Metrics) -> None:
    result = top(fake_pool, "--once", "--json", "--metrics", metrics.address)
    told = json.loads(result.stdout)
    assert told["figures"]["output_tokens_per_s"] > 0
    assert told["figures"]["ttft_s"] == [pytest.approx(0.5), pytest.approx(0.99)]
    assert told["status"]["nodes"][0]["capacity_tokens"] == 6336


def test_metrics_that_were_asked_for_are_missed(fake_pool: Any, free_port: int) -> None:
    result = top(fake_pool, "--once", "--metrics", f"127.0.0.1:{free_port}")
    assert result.exit_code == 0
    assert f"no metrics from http://127.0.0.1:{free_port}/metrics" in result.stdout


def test_a_pool_that_never_answered_is_an_error(free_port: int) -> None:
    result = CliRunner().invoke(main, ["top", "--target", f"127.0.0.1:{free_port}"])
    assert result.exit_code == 1
    assert "error:" in result.stderr


def test_labels_are_summed_up() -> None:
    text = '# TYPE a_total counter\na_total{x="1"} 2\na_total{x="2"} 3\n'
    assert parsed(text).counters == {"a_total": 5}


@pytest.mark.parametrize("end", ["q", "interrupt"])
def test_at_a_terminal_it_draws_until_it_is_ended(fake_pool: Any, end: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "tknp.cli.main", "top", "--target", fake_pool.target,
         "--interval", "0.1"],
        stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"},
    )  # fmt: skip
    os.close(theirs)
    try:
        drawn = read_until(ours, rb"(?s)tiny.*q quits.*tiny.*q quits")
        if end == "q":
            os.write(ours, b"q")
        else:
            process.send_signal(signal.SIGINT)
        read_until(ours, rb"\x1b\[\?1049l")  # back from the alternate screen
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[?1049h" in drawn


def read_until(descriptor: int, pattern: bytes) -> bytes:
    """What a terminal shows until `pattern` is there; waits a minute for each part of it."""
    seen = b""
    while not re.search(pattern, seen):
        assert select.select([descriptor], [], [], 60)[0], seen
        seen += os.read(descriptor, 65536)
    return seen


def test_metrics_are_looked_for_but_not_needed(fake_pool: Any) -> None:
    result = top(fake_pool, "--once")
    assert result.exit_code == 0
    assert "tokens/s" in result.stdout
    assert "no metrics" not in result.stdout


async def test_a_pool_that_stops_answering_stays_in_sight(fake_pool: Any) -> None:
    async with Client(fake_pool.target) as client:
        watched = Watched(client, MetricsReader("", fake_pool.target))
        await watched.look()
        fake_pool.stop()
        async for trouble in watched.looks(0.01):
            if trouble:
                break
    assert watched.plain()["status"]["model"] == "tiny"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(frame(watched.history, 80, trouble))
    assert trouble[:40] in console.export_text()
