"""The unmodified kubectl speaks with the fake API server and with a real one."""

from __future__ import annotations

import json
import subprocess
import sys
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
