"""Machines without kubelets: Nodes that stay Ready, and what a kubelet would say of pods.

A control plane marks a Node that falls silent, and begins with a taint that only a Ready one loses;
where a scheduler binds pods to such a Node, nobody ends them.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from datetime import UTC, datetime
from typing import Any

from kubernetes.client import ApiException

from .cluster import Cluster

_HEARTBEAT_S = 5.0


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def tell_node(cluster: Cluster, name: str, *, ready: bool, since: str = "") -> None:
    """What the control plane would say of a node: Ready, or not since `since`."""
    condition = {"type": "Ready", "status": str(ready), "reason": "Tests",
                 "lastHeartbeatTime": _stamp(),
                 "lastTransitionTime": since or "2026-01-01T00:00:00Z"}  # fmt: skip
    amounts = {"cpu": "8", "memory": "32Gi", "pods": "110"}
    status = {"conditions": [condition], "capacity": amounts, "allocatable": amounts}
    node = cluster.core.patch_node_status(name, {"status": status})
    if ready and node.spec is not None and node.spec.taints:
        cluster.core.patch_node(name, {"spec": {"taints": None}})


class Machines:
    """`count` Nodes that only services with `selector` use, from `with` until left."""

    def __init__(self, cluster: Cluster, count: int) -> None:
        word = uuid.uuid4().hex[:6]
        self.names = [f"tknp-test-{word}-{letter}" for letter in "abcdefgh"[:count]]
        self.selector = {"tknp-test": word}
        self._cluster, self._since = cluster, _stamp()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> Machines:
        for name in self.names:
            metadata = {"name": name, "labels": self.selector}
            self._cluster.core.create_node({"metadata": metadata})
        self._tell()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join()
        for name in self.names:
            self._cluster.core.delete_node(name)

    def _beat(self) -> None:
        while not self._closing.wait(_HEARTBEAT_S):
            with contextlib.suppress(ApiException):
                self._tell()

    def _tell(self) -> None:
        for name in self.names:
            tell_node(self._cluster, name, ready=True, since=self._since)

    def tell_pods(self, namespace: str) -> None:
        """Every pod is ready, and what is to end has ended."""
        core, condition = self._cluster.core, {"type": "Ready", "status": "True"}
        for pod in core.list_namespaced_pod(namespace).items:
            name = pod.metadata.name
            with contextlib.suppress(ApiException):  # it may be gone by now
                if pod.metadata.deletion_timestamp is not None:
                    core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)
                elif not _ready(pod):
                    core.patch_namespaced_pod_status(
                        name, namespace, {"status": {"conditions": [condition]}}
                    )


def _ready(pod: Any) -> bool:
    conditions = pod.status.conditions or ()
    return any(c.type == "Ready" and c.status == "True" for c in conditions)
