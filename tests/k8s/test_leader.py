"""Two operators' electors as processes, one Lease on the API server: takeover, and its loss."""

from __future__ import annotations

import contextlib
import http.server
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)
ELECTOR = """
import sys, threading
from pathlib import Path
from tknp_operator.cluster.client import connect
from tknp_operator.controller.leader import Times, lead

def act():
    print("acting", flush=True)
    threading.Event().wait()

print("waiting", flush=True)
lead(connect(Path(sys.argv[1])), sys.argv[2], "turns", act, Times(*map(int, sys.argv[3:])))
"""
TIMES = ("6", "3", "1", "1")  # so that a leader of a slow machine renews in time

ASKED = """
import sys
from pathlib import Path
from kubernetes.leaderelection.leaderelectionrecord import LeaderElectionRecord
from tknp_operator.cluster.client import connect
from tknp_operator.controller.leader import lock_of

lock = lock_of(connect(Path(sys.argv[1])), "ns", "turns", "me", 1)
print(lock.get("turns", "ns")[0])
now = "2026-01-01 00:00:00"
print(lock.create("turns", "ns", LeaderElectionRecord("me", "15", now, now)))
"""
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: c
contexts: [{{name: c, context: {{cluster: c, user: u}}}}]
clusters: [{{name: c, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: u, user: {{}}}}]
"""


@pytest.fixture
def elector(cluster: Any, namespace: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that acts when it is its turn; it has said that it waits."""
    made = []

    def start(kubeconfig: Path = cluster.kubeconfig) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", ELECTOR, str(kubeconfig), namespace, *TIMES],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        made.append(process)
        assert said(process) == "waiting"
        return process

    yield start
    for process in made:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def said(process: subprocess.Popen[str]) -> str:
    """The next line of `process`; fails if none comes within a minute."""
    assert process.stdout is not None
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.append(process.stdout.readline()), daemon=True)  # type: ignore[union-attr]
    reader.start()
    reader.join(60)
    assert lines, "it says nothing"
    return lines[0].strip()


def test_one_that_is_frozen_is_replaced_and_ends_when_it_wakes_up(
    elector: Callable[..., subprocess.Popen[str]],
) -> None:
    first = elector()
    assert said(first) == "acting"
    second = elector()
    first.send_signal(signal.SIGSTOP)
    assert said(second) == "acting"
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 1  # rather than act beside the other
    assert second.poll() is None


class Dripping(http.server.BaseHTTPRequestHandler):
    """Lets a Lease be made, and answers whoever asks for it afterwards with a byte a moment."""

    made = threading.Event()
    over = threading.Event()

    def do_GET(self) -> None:
        if not self.made.is_set():
            self._answer(404, {"kind": "Status", "code": 404})
            return
        self._head(200, 1 << 20)
        with contextlib.suppress(OSError):  # until whoever asks is gone
            while not self.over.wait(0.2):
                self.wfile.write(b" ")

    def do_POST(self) -> None:
        lease = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.made.set()
        self._answer(201, lease)

    def _answer(self, code: int, body: object) -> None:
        text = json.dumps(body).encode()
        self._head(code, len(text))
        self.wfile.write(text)

    def _head(self, code: int, length: int) -> None:
        self.send_response(code)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """What is asked for is no news."""


def test_a_leader_whose_request_never_ends_ends_itself(
    elector: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    Dripping.made.clear()
    Dripping.over.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripping)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    try:
        kubeconfig = tmp_path / "config"
        kubeconfig.write_text(KUBECONFIG.format(port=server.server_port))
        leader = elector(kubeconfig)
        assert said(leader) == "acting"
        assert leader.wait(60) == 1
    finally:
        Dripping.over.set()
        server.shutdown()
        serving.join()
        server.server_close()


def test_a_request_of_the_lock_ends_though_the_server_hangs(tmp_path: Path) -> None:
    """The server takes connections and never answers: that is a failure in time, not a wait."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        kubeconfig = tmp_path / "config"
        kubeconfig.write_text(KUBECONFIG.format(port=hanging.getsockname()[1]))
        done = subprocess.run(
            [sys.executable, "-c", ASKED, str(kubeconfig)], capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
    assert done.stdout.split() == ["False", "False"]
