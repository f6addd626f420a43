from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from tknp.cli.main import main
from tknp.cli.status import uptime_text
from tknp.v1 import common_pb2


def test_table_fits_80_columns_and_names_every_service(fake_pool: Any) -> None:
    result = CliRunner().invoke(main, ["status", "--target", fake_pool.target])
    assert result.exit_code == 0
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    for fact in (
        "ready · float32 · TKNP · 2 nodes x TP 1 · epoch 3", "embedding, layers 0-14, head",
        "layers 15-29", "5,000 / 6,336", "12.3 ms", "127.0.0.1:12 · 200 MiB", "prefill 0",
        "0 queued · 0 prefilling · 2 running", "5 completed", "up 1h 2m",
    ):  # fmt: skip
        assert fact in result.stdout


def test_streams_are_shown_with_their_roots(fake_pool: Any) -> None:
    status = fake_pool.status
    status.copies, status.preemptions = 2, 3
    for stream, order in enumerate([(0, 1), (1, 0)]):
        shown = status.streams.add(stream=stream, running=4 + stream, steps=1000)
        for block, node in enumerate(order):
            shown.roots.add(node=node, layer_start=15 * block, layer_stop=15 * block + 15)
        status.nodes[stream].blocks.add(layer_start=15, layer_stop=30)
    result = CliRunner().invoke(main, ["status", "--target", fake_pool.target])
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    for fact in (
        "TKNP · 2 nodes x TP 1 · 2 copies · 2 streams", "layers 15-29 + layers 15-29",
        "node 0: 0-14, 1: 15-29", "node 1: 0-14, 0: 15-29", "3 made room and were computed again",
    ):  # fmt: skip
        assert fact in result.stdout


def test_a_service_that_is_not_ready_says_why(fake_pool: Any) -> None:
    fake_pool.status.ready = False
    fake_pool.status.phase = common_pb2.PHASE_FAILED
    fake_pool.status.error = "node 1 is gone"
    fake_pool.status.nodes[1].progress.phase = common_pb2.PHASE_JOINING
    result = CliRunner().invoke(main, ["status", "--target", fake_pool.target])
    assert "failed · float32" in result.stdout
    assert "joining peers · 127.0.0.1:12" in result.stdout
    assert "node 1 is gone" in result.stdout


def test_json_has_every_field_by_its_own_name_and_numbers(fake_pool: Any) -> None:
    result = CliRunner().invoke(main, ["status", "--target", fake_pool.target, "--json"])
    status = json.loads(result.stdout)
    assert list(status)[:4] == ["ready", "phase", "model", "dtype"]
    assert (status["cancelled"], status["error"]) == (0, "")
    assert status["steps"] == 9_007_199_254_740_993
    assert status["nodes"][0]["capacity_tokens"] == 6336
    assert status["nodes"][1]["progress"]["phase"] == "PHASE_READY"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (61.9, "1m 1s"), (3600, "1h 0m"), (90000, "1d 1h")],
)
def test_uptime(seconds: float, text: str) -> None:
    assert uptime_text(seconds) == text
