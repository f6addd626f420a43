"""The operator's process against a control plane without kubelets, the fake or a real one.

Pods stay as they are made; the test says what a kubelet would. On a real cluster the operator runs
outside of it under the account of TKNP_OPERATOR_KUBECONFIG, if that is set: the chart's own, whose
RBAC is what it may do. Nodes of the test's own are made, so that placement has somewhere to go.
"""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from kubernetes.client import ApiException

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def nodes(cluster: Any, tell_node: Any) -> Iterator[list[str]]:
    """Three nodes that only this test's services may use, by their label."""
    word = uuid.uuid4().hex[:6]
    names = [f"tknp-test-{word}-{letter}" for letter in "abc"]
    for name in names:
        cluster.core.create_node({"metadata": {"name": name, "labels": {"tknp-test": word}}})
        tell_node(cluster, name, ready=True, since=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    yield names
    for name in names:
        cluster.core.delete_node(name)


@pytest.fixture
def operator_here(cluster: Any, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """The operator of `namespace`; its log."""
    program = Path(sys.executable).parent / "tknp-operator"
    account = os.environ.get("TKNP_OPERATOR_KUBECONFIG") if cluster.fake is None else None
    path, environment = tmp_path / "operator.log", {**os.environ}
    environment.pop("KUBECONFIG", None)
    with open(path, "wb") as log:
        process = subprocess.Popen(
            [str(program), "--kubeconfig", account or str(cluster.kubeconfig),
             "--namespace", namespace, "--metrics-port", "0"],
            stdout=log, stderr=log, env=environment,
        )  # fmt: skip
    yield path
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def test_it_makes_an_epoch_tells_when_it_serves_and_replaces_it(
    cluster: Any, namespace: str, nodes: list[str], operator_here: Path, until: Any,
    service_object: Callable[..., dict[str, Any]],
) -> None:  # fmt: skip
    core, word = cluster.core, nodes[0].split("-")[2]
    resource = cluster.resource("tknp.io/v1alpha1", "TokenParallelService")

    def here(spec: dict[str, Any]) -> None:
        spec["scheduling"] = {"nodeSelector": {"tknp-test": word}}

    resource.create(body=service_object("demo", namespace, change=here), namespace=namespace)

    def service() -> dict[str, Any]:
        found: dict[str, Any] = resource.get(name="demo", namespace=namespace).to_dict()
        return found

    def ready() -> bool:
        """Says of every pod that it is ready, as its kubelet would; whether the service is."""
        for pod in core.list_namespaced_pod(namespace).items:
            condition = {"type": "Ready", "status": "True"}
            try:
                core.patch_namespaced_pod_status(
                    pod.metadata.name, namespace, {"status": {"conditions": [condition]}}
                )
            except ApiException as error:
                if error.status != 404:  # it may be gone by now
                    raise
        conditions = (service().get("status") or {}).get("conditions") or ()
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def why() -> str:
        return f"{service().get('status')}\n{operator_here.read_text()[-3000:]}"

    until(ready, why)
    status = service()["status"]
    assert status["epoch"] == 1
    assert {node["host"] for node in status["nodes"]} <= set(nodes)
    names = {pod.metadata.name for pod in core.list_namespaced_pod(namespace).items}
    assert names == {"demo-decode-1-0", "demo-decode-1-1", "demo-prefill-1-0",
                     "demo-coordinator-1"}  # fmt: skip

    core.delete_namespaced_pod("demo-decode-1-1", namespace)
    until(lambda: ready() and service()["status"]["epoch"] == 2, why)
    names = {pod.metadata.name for pod in core.list_namespaced_pod(namespace).items}
    assert names == {"demo-decode-2-0", "demo-decode-2-1", "demo-prefill-2-0",
                     "demo-coordinator-2"}  # fmt: skip

    resource.delete(name="demo", namespace=namespace)
    until(lambda: not core.list_namespaced_pod(namespace).items, why)
    until(lambda: not resource.get(namespace=namespace).items, why)
