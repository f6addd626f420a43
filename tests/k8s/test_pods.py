"""Pods as the operator builds them, run for real: their commands, files, names, TLS and probes.

No operator decides anything here; the manifests of one epoch are put on the fake API server and a
kubelet of the tests starts what they say.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tknp_operator.api.service import parse
from tknp_operator.build.network import coordinator_service, headless_service
from tknp_operator.build.pods import coordinator_pod, decode_pod, prefill_pod
from tknp_operator.build.pool import pool_file_map
from tknp_operator.build.secrets import internal_secret
from tknp_operator.placement.place import PlacedNode, Placement, Slot

WAIT_S = 60.0
pytestmark = pytest.mark.timeout(180)


def until(condition: Callable[[], Any], what: Callable[[], str]) -> Any:
    ends_s = time.monotonic() + WAIT_S
    while time.monotonic() < ends_s:
        if found := condition():
            return found
        time.sleep(0.1)
    raise AssertionError(what())


def ready(core: Any, namespace: str) -> dict[str, bool]:
    pods = core.list_namespaced_pod(namespace).items
    return {
        pod.metadata.name: any(
            c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ()
        )
        for pod in pods
    }


def generate(kubelet: Any, namespace: str, prompt: str, directory: Path) -> str:
    """What `tknp generate` prints, as a client inside the cluster with the API token."""
    secret = kubelet.core.read_namespaced_secret("demo-internal", namespace).data
    for name in ("ca.crt", "api-token"):
        (directory / name).write_bytes(base64.b64decode(secret[name]))
    done = subprocess.run(
        [str(Path(sys.executable).parent / "tknp"), "generate", "--json", "--raw",
         "--target", f"demo-coordinator.{namespace}.svc:50051",
         "--tls-ca", str(directory / "ca.crt"), "--token-file", str(directory / "api-token"),
         "--max-tokens", "8", "--ignore-eos", prompt],
        env=dict(kubelet.environment), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return str(answer["text"])


def test_an_epoch_serves_and_a_prefill_replica_joins_it(
    fake_cluster: Any, machines: Any, tiny_service: Any, tmp_path: Path
) -> None:
    core, namespace = fake_cluster.core, "pods"
    core.create_namespace({"metadata": {"name": namespace}})
    kubelet = machines("a", "b")
    resource = fake_cluster.resource("tknp.io/v1alpha1", "TokenParallelService")
    made = resource.create(body=tiny_service("demo", namespace), namespace=namespace)
    service = parse(made.to_dict())
    slots = [Slot("a"), Slot("b")]
    placement = Placement(tuple(PlacedNode(n, slot, "") for n, slot in enumerate(slots)))
    core.create_namespaced_secret(namespace, internal_secret(service, datetime.now(UTC)))
    core.create_namespaced_config_map(namespace, pool_file_map(service, 1, placement))
    core.create_namespaced_service(namespace, headless_service(service))
    core.create_namespaced_service(namespace, coordinator_service(service, 1))
    pods = [decode_pod(service, 1, n, slot) for n, slot in enumerate(slots)]
    for pod in (*pods, prefill_pod(service, 1, 0), coordinator_pod(service, 1)):
        core.create_namespaced_pod(namespace, pod)

    def all_ready() -> bool:
        assert kubelet.error is None, kubelet.error
        return all(ready(core, namespace).values())

    def logs() -> str:
        tails = [f"{r.pod['metadata']['name']}: {r.log.read_text()[-1500:]}"
                 for r in kubelet.running.values() if r.log.exists()]  # fmt: skip
        return "\n".join([str(ready(core, namespace)), *tails])

    until(all_ready, logs)
    where = {p.metadata.name: p.spec.node_name for p in core.list_namespaced_pod(namespace).items}
    assert (where["demo-decode-1-0"], where["demo-decode-1-1"]) == ("a", "b")
    text = generate(kubelet, namespace, "hello", tmp_path)
    core.create_namespaced_pod(namespace, prefill_pod(service, 1, 1))
    until(all_ready, logs)
    core.delete_namespaced_pod("demo-prefill-1-0", namespace)
    until(lambda: "demo-prefill-1-0" not in ready(core, namespace), logs)
    assert generate(kubelet, namespace, "hello", tmp_path) == text
