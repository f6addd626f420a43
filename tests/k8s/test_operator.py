"""The operator's process against a control plane without kubelets, the fake or a real one.

The chart is installed by Helm, and the operator runs outside of the cluster under the account that
it made there, whose RBAC is what it may do (TKNP_OPERATOR_KUBECONFIG: under that one). Where an
operator is at work already, it is that one which is looked at. Pods stay as they are made; the test
says what a kubelet would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(300)
_NOTICED_S = 8.0
WAIT_S = 120.0


@pytest.fixture
def machines(cluster: Any, clusters: ModuleType) -> Iterator[Any]:
    with clusters.Machines(cluster, 3) as made:
        yield made


def works(cluster: Any, namespace: str, body: dict[str, Any]) -> bool:
    """Whether an operator has taken notice of a service soon."""
    cluster.services.create(body=body, namespace=namespace)
    place, ends_s, noticed = {"name": body["metadata"]["name"], "namespace": namespace}, 0.0, False
    ends_s = time.monotonic() + _NOTICED_S
    while not noticed and time.monotonic() < ends_s:
        time.sleep(0.2)
        noticed = bool(cluster.services.get(**place).to_dict()["metadata"].get("finalizers"))
    cluster.services.delete(**place)
    return noticed


@pytest.fixture
def operator_log(
    cluster: Any, clusters: ModuleType, namespace: str, started: Callable[..., Any],
    service_object: Callable[..., dict[str, Any]], tmp_path: Path,
) -> Iterator[Path]:  # fmt: skip
    """Somebody keeps the services of `namespace`; the log, if it is our own operator."""
    log = tmp_path / "operator.log"
    log.touch()
    probe = service_object("probe", namespace, change=lambda spec: spec.update(suspend=True))
    if cluster.fake is None and works(cluster, namespace, probe):
        yield log
        return
    values = {"operator": {"watchNamespace": namespace, "replicas": 1}}
    with clusters.install(cluster, namespace, values):
        given = os.environ.get("TKNP_OPERATOR_KUBECONFIG") if cluster.fake is None else None
        account = Path(given) if given else clusters.kubeconfig_of(cluster, namespace, tmp_path)
        with started(account, log, "--namespace", namespace):
            yield log


def test_it_makes_an_epoch_tells_when_it_serves_and_replaces_it(
    cluster: Any, namespace: str, machines: Any, operator_log: Path, until: Any,
    service_object: Callable[..., dict[str, Any]],
) -> None:  # fmt: skip
    core = cluster.core

    def here(spec: dict[str, Any]) -> None:
        spec["scheduling"] = {"nodeSelector": machines.selector}

    body = service_object("demo", namespace, change=here)
    cluster.services.create(body=body, namespace=namespace)

    def service() -> dict[str, Any]:
        found: dict[str, Any] = cluster.services.get(name="demo", namespace=namespace).to_dict()
        return found

    def serves(epoch: int) -> bool:
        machines.tell_pods(namespace)
        status = service().get("status") or {}
        ready = {c["type"] for c in status.get("conditions") or () if c["status"] == "True"}
        return "Ready" in ready and status["epoch"] == epoch

    def names() -> set[str]:
        machines.tell_pods(namespace)
        found = core.list_namespaced_pod(namespace, label_selector="tknp.io/pool=demo").items
        return {pod.metadata.name for pod in found}

    def why() -> str:
        return f"{service().get('status')}\n{operator_log.read_text()[-3000:]}"

    def epoch(number: int) -> set[str]:
        roles = (f"decode-{number}-0", f"decode-{number}-1", f"prefill-{number}-0")
        return {f"demo-{role}" for role in (*roles, f"coordinator-{number}")}

    until(lambda: serves(1), why, WAIT_S)
    assert {node["host"] for node in service()["status"]["nodes"]} <= set(machines.names)
    assert names() == epoch(1)

    core.delete_namespaced_pod("demo-decode-1-1", namespace)
    until(lambda: serves(2) and names() == epoch(2), why, WAIT_S)

    cluster.services.delete(name="demo", namespace=namespace)
    until(lambda: not cluster.services.get(namespace=namespace).items, operator_log.read_text)
    if cluster.collects:
        until(lambda: not names(), lambda: str(names()))
