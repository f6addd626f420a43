"""The unmodified kubectl speaks with the fake API server and with a real one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kubectl(cluster: Any, *arguments: str, stdin: str = "") -> str:
    program = Path(sys.executable).parent / "kubectl"
    done = subprocess.run(
        [str(program), "--kubeconfig", str(cluster.kubeconfig), *arguments],
        input=stdin, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kubectl_speaks_with_it(cluster: Any, namespace: str, a_map: Any) -> None:
    text = json.dumps(a_map("a", k="v"))
    flags = ("-n", namespace)
    applied = kubectl(cluster, *flags, "apply", "--server-side", "-f", "-",
                      stdin=text)  # fmt: skip
    assert "configmap/a serverside-applied" in applied
    assert "a" in kubectl(cluster, *flags, "get", "cm")
    assert kubectl(cluster, *flags, "get", "cm", "a", "-o", "jsonpath={.data.k}") == "v"
    kubectl(cluster, *flags, "label", "cm", "a", "x=y")
    assert "configmap/a" in kubectl(cluster, *flags, "get", "cm", "-l", "x=y", "-o", "name")
    assert "deleted" in kubectl(cluster, *flags, "delete", "cm", "a")


def test_services_are_listed_with_what_matters(
    cluster: Any, namespace: str, service_object: Callable[..., dict[str, Any]]
) -> None:
    """One line says whether a service serves, and why not."""
    body = service_object("demo", namespace, paused=True)
    cluster.services.create(body=body, namespace=namespace)
    now = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "False", "reason": "NotPlaced", "lastTransitionTime": now,
             "message": "no node has a GPU"}  # fmt: skip
    placed = {**ready, "type": "Placed", "message": "not this one"}
    status = {"epoch": 3, "prefill": {"ready": 1}, "conditions": [placed, ready]}
    cluster.services.status.patch(
        body={"status": status}, name="demo", namespace=namespace,
        content_type="application/merge-patch+json",
    )  # fmt: skip
    head, line = kubectl(cluster, "-n", namespace, "get", "tps").splitlines()
    assert head.split() == [
        "NAME",
        "READY",
        "NODES",
        "PREFILL",
        "GATEWAY",
        "EPOCH",
        "MESSAGE",
        "AGE",
    ]
    assert line.split()[:5] == ["demo", "False", "2", "1", "3"]
    assert "no node has a GPU" in line
