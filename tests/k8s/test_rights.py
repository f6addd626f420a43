"""What the chart grants the operator is what it uses: a missing verb stops it, a spare one shows.

The operator's own process with the rights of its account, through everything that it makes, changes
and deletes. The fake API server refuses what no rule allows and keeps what was used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from kubernetes import client

from tknp_operator.cluster.rights import RIGHTS

pytestmark = pytest.mark.timeout(300)
MERGE = "application/merge-patch+json"


def definition(group: str, version: str, kind: str) -> dict[str, Any]:
    """A kind of somebody else, as far as an operator of ours sees it."""
    plural = f"{kind.lower()}s"
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
            "versions": [{"name": version, "served": True, "storage": True,
                          "schema": {"openAPIV3Schema": anything}}],
        },
    }  # fmt: skip


@pytest.fixture
def system(fake_cluster: Any, clusters: ModuleType) -> Iterator[str]:
    """The operator's namespace, on a cluster with every optional kind."""
    crds = client.ApiextensionsV1Api(fake_cluster.api)
    for kind in (("resource.nvidia.com", "v1beta1", "ComputeDomain"), ("ray.io", "v1",
                 "RayService")):  # fmt: skip
        crds.create_custom_resource_definition(definition(*kind))
    with clusters.namespace(fake_cluster) as name:
        clusters.grant(fake_cluster, name, {})
        yield name


class Life:
    """One service through its life, and a kubelet's and a Job's words meanwhile."""

    def __init__(self, cluster: Any, machines: Any, namespace: str, until: Any, log: Path) -> None:
        self.cluster, self.machines, self.namespace = cluster, machines, namespace
        self._until, self._log = until, log
        self.batch = client.BatchV1Api(cluster.api)

    def change(self, **spec: Any) -> None:
        self.cluster.services.patch(body={"spec": spec}, name="demo", namespace=self.namespace,
                                    content_type=MERGE)  # fmt: skip

    def names(self, api_version: str, kind: str) -> set[str]:
        found = self.cluster.resource(api_version, kind).get(namespace=self.namespace).items
        return {obj.metadata.name for obj in found}

    def serves(self, epoch: int) -> None:
        """Wait until the service is Ready in `epoch`."""

        def ready() -> bool:
            self.machines.tell_pods(self.namespace)
            for job in self.names("batch/v1", "Job"):
                done = {"type": "Complete", "status": "True"}
                self.batch.patch_namespaced_job_status(
                    job, self.namespace, {"status": {"conditions": [done]}})  # fmt: skip
            status = self._service().get("status") or {}
            true = {c["type"] for c in status.get("conditions") or () if c["status"] == "True"}
            return status.get("epoch") == epoch and "Ready" in true

        self._until(ready, self._why, 120)

    def has(self, present: bool, api_version: str, kind: str, name: str) -> None:
        """Wait until an object is there, or is there no more."""
        self._until(lambda: (name in self.names(api_version, kind)) == present, self._why)

    def _service(self) -> dict[str, Any]:
        found = self.cluster.services.get(name="demo", namespace=self.namespace)
        service: dict[str, Any] = found.to_dict()
        return service

    def _why(self) -> str:
        return f"{self._service().get('status')}\n{self._log.read_text()[-3000:]}"


def lead_a_life(life: Life, body: dict[str, Any]) -> None:
    """Everything that the operator does of its own accord, once."""
    core, namespace = life.cluster.core, life.namespace
    life.cluster.services.create(body=body, namespace=namespace)
    life.serves(1)
    life.has(True, "autoscaling/v2", "HorizontalPodAutoscaler", "demo-gateway")
    core.patch_namespaced_secret("demo-internal", namespace, {"data": {"tls.crt": ""}})
    life.change(gateway={"autoscaling": None, "ray": "rayService"}, decode={"maxBatch": 8})
    life.has(True, "ray.io/v1", "RayService", "demo-gateway")
    life.serves(2)
    life.has(False, "v1", "ConfigMap", "demo-pool-1")
    life.change(gateway={"enabled": False}, prefill={"autoscaling": None})
    for kind in (("ray.io/v1", "RayService", "demo-gateway"), ("v1", "Service", "demo-gateway"),
                 ("policy/v1", "PodDisruptionBudget", "demo-gateway"),
                 ("apps/v1", "Deployment", "demo-gateway"),
                 ("autoscaling/v2", "HorizontalPodAutoscaler", "demo-prefill")):  # fmt: skip
        life.has(False, *kind)
    life.change(topology={"computeDomain": True}, decode={"device": "cuda"})
    life.has(True, "resource.nvidia.com/v1beta1", "ComputeDomain", "demo-imex")
    life.change(suspend=True)
    life.cluster.services.delete(name="demo", namespace=namespace)
    life.has(False, "tknp.io/v1alpha1", "TokenParallelService", "demo")


def test_all_that_is_granted_is_used_and_nothing_else(
    fake_cluster: Any, clusters: ModuleType, system: str, started: Callable[..., Any], until: Any,
    service_object: Callable[..., dict[str, Any]], tmp_path: Path,
) -> None:  # fmt: skip
    kubeconfig, log = clusters.kubeconfig_of(fake_cluster, system, tmp_path), tmp_path / "log"
    turns = ("--leader-elect", "--lease-name", "tknp-operator", "--lease-namespace", system)
    with (
        clusters.Machines(fake_cluster, 2) as machines,
        clusters.namespace(fake_cluster) as namespace,
        started(kubeconfig, log, *turns),
    ):

        def full(spec: dict[str, Any]) -> None:
            scaling = {"minReplicas": 1, "maxReplicas": 2}
            spec["scheduling"] = {"nodeSelector": machines.selector}
            store = {"uri": "s3://bucket/model", "claimName": "models"}
            spec["model"]["source"] = {"objectStore": store}
            spec["prefill"]["autoscaling"] = scaling
            spec["gateway"] = {"autoscaling": scaling, "ray": "standalone"}

        lead_a_life(Life(fake_cluster, machines, namespace, until, log),
                    service_object("demo", namespace, change=full))  # fmt: skip
    used = fake_cluster.fake.rights.used[system, "tknp-operator"]
    granted = {
        (right.group, right.resource, verb)
        for right in RIGHTS if right.scope != "upgrade" for verb in right.verbs
    }  # fmt: skip
    assert used <= granted
    assert sorted(granted - used) == [], granted - used
    assert "403" not in log.read_text()
