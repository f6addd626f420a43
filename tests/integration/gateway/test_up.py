"""`tknp up --gateway`: a pool and its gateway come together and go together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx2
import psutil
import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(300)]


def test_a_gateway_comes_and_goes_with_its_pool(speaker: Path, tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tknp.cli.main", "up", "--json", "--port", "0", "--nodes", "1",
            "--kv-memory", "64MiB", "--model", str(speaker), "--gateway", "--http-port", "0",
            "--run-dir", str(tmp_path)]  # fmt: skip
    process = subprocess.Popen(argv, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        facts = json.loads(line)
        assert "gateway" in facts["pids"]
        family = psutil.Process(process.pid).children(recursive=True)
        assert any("raylet" in child.name() for child in family)
        body = {"model": "speaker", "prompt": "x", "temperature": 0, "max_tokens": 4}
        found = httpx2.post(f"{facts['gateway']}/v1/completions", json=body, timeout=60)
        assert found.json()["choices"][0]["text"] == "Wave"
        requests = (tmp_path / "logs" / "gateway-requests.log").read_text().splitlines()
        assert json.loads(requests[-1])["status"] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
        until_s = time.monotonic() + 60
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family):
            assert time.monotonic() < until_s
            time.sleep(0.05)
        left = [name for name in os.listdir("/tmp") if name.startswith("tknp-ray-")]
        assert not [name for name in left if name.split("-")[2] == str(facts["pids"]["gateway"])]
    finally:
        process.kill()
        process.communicate()
