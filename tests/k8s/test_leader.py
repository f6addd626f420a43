"""Two operators' electors as processes, one Lease on the API server: takeover, and its loss."""

from __future__ import annotations

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
lead(connect(Path(sys.argv[1])), sys.argv[2], "turns", act, Times(3, 2, 1, 1))
"""

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
def elector(cluster: Any, namespace: str) -> Iterator[Callable[[], subprocess.Popen[str]]]:
    """Starts a process that acts when it is its turn; it has said that it waits."""
    made = []

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", ELECTOR, str(cluster.kubeconfig), namespace],
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
    elector: Callable[[], subprocess.Popen[str]],
) -> None:
    first = elector()
    assert said(first) == "acting"
    second = elector()
    first.send_signal(signal.SIGSTOP)
    assert said(second) == "acting"
    first.send_signal(signal.SIGCONT)
    assert first.wait(60) == 1  # rather than act beside the other
    assert second.poll() is None


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
