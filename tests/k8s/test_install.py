"""The chart by Helm on an API server: everything is taken, by capability, and leaves again."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from kubernetes import client

pytestmark = pytest.mark.timeout(180)
PROMETHEUS = ("PodMonitor", "PrometheusRule")
SERVICE = {
    "enabled": True,
    "spec": {"model": {"source": {"builtin": "smollm2"}, "name": "smollm2"},
             "decode": {"nodes": 2, "device": "cpu"}},
}  # fmt: skip


@pytest.fixture
def prometheus_operator(bare_cluster: Any) -> None:
    """Its kinds, as far as somebody who makes such objects sees them."""
    crds = client.ApiextensionsV1Api(bare_cluster.api)
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    for kind in PROMETHEUS:
        plural, group = f"{kind.lower()}s", "monitoring.coreos.com"
        crds.create_custom_resource_definition({
            "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": f"{plural}.{group}"},
            "spec": {"group": group, "scope": "Namespaced",
                     "names": {"plural": plural, "singular": kind.lower(), "kind": kind},
                     "versions": [{"name": "v1", "served": True, "storage": True,
                                   "schema": {"openAPIV3Schema": anything}}]},
        })  # fmt: skip


def of_release(cluster: Any) -> set[tuple[str, str]]:
    """Resource and name of everything that Helm has made, CustomResourceDefinitions aside."""
    return {
        (key[1], obj["metadata"]["name"])
        for key, obj in cluster.fake.api.store.everything()
        if (obj["metadata"].get("labels") or {}).get("app.kubernetes.io/managed-by") == "Helm"
    }


def test_a_bare_cluster_gets_definitions_and_a_service(
    bare_cluster: Any, clusters: ModuleType
) -> None:
    """The first install brings the CRD that its own service needs; notes name what to run."""
    with (
        clusters.namespace(bare_cluster) as namespace,
        clusters.install(bare_cluster, namespace, {"service": SERVICE}) as notes,
    ):
        (service,) = bare_cluster.services.get(namespace=namespace).items
        assert service.spec.image == "tknp/engine:0.1.0"
        assert not any(
            resource.startswith("podmonitor") for resource, _ in of_release(bare_cluster)
        )
        assert f"kubectl -n {namespace} wait tps/tknp --for condition=Ready" in notes
    assert of_release(bare_cluster) == set()


@pytest.mark.full
def test_monitors_are_made_where_the_cluster_has_their_kinds(
    bare_cluster: Any, clusters: ModuleType, prometheus_operator: None
) -> None:
    values = {"monitoring": {"podMonitor": {"pools": [{"name": "llama", "ranks": 2}]}}}
    with (
        clusters.namespace(bare_cluster) as namespace,
        clusters.install(bare_cluster, namespace, values),
    ):
        made = of_release(bare_cluster)
        assert {("podmonitors", "tknp-operator"), ("podmonitors", "llama-pool"),
                ("podmonitors", "llama-gateway"), ("prometheusrules", "tknp")} <= made  # fmt: skip
    assert of_release(bare_cluster) == set()


@pytest.mark.full
def test_it_installs_on_the_cluster_that_is_there(
    cluster: Any, namespace: str, clusters: ModuleType
) -> None:
    """Every kind of object that the chart has, on a real cluster too."""
    values = {
        "operator": {"watchNamespace": namespace, "replicas": 1},
        "service": {**SERVICE, "spec": {**SERVICE["spec"], "suspend": True}},
        "load": {"enabled": True, "target": "grpc://tknp-coordinator:50051", "pods": 1,
                 "traceConfigMap": "t", "resultsClaim": "r"},
    }  # fmt: skip
    with clusters.install(cluster, namespace, values):
        (service,) = cluster.services.get(namespace=namespace).items
        assert service.spec.drain.seconds == 30
        clusters.empty(cluster, namespace)
