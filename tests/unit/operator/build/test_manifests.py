"""What is built is what Kubernetes 1.36 takes, unknown fields and all, and what it lets run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest

from tknp_operator.api.service import Service, parse
from tknp_operator.build.gateway import gateway_deployment
from tknp_operator.build.hydrate import hydration_job
from tknp_operator.build.network import (
    coordinator_service,
    disruption_budget,
    gateway_service,
    headless_service,
    network_policy,
    pool_budgets,
)
from tknp_operator.build.pods import coordinator_pod, decode_pod, prefill_pod
from tknp_operator.placement.place import Slot

GPUS: dict[str, Any] = {"device": "cuda", "tensorParallel": 4}
SERVICES: dict[str, dict[str, Any]] = {
    "cpu": {"model": {"source": {"builtin": "smollm2"}}, "decode": {"device": "cpu"}},
    "claim": {"model": {"source": {"pvc": {"claimName": "m"}}}, "decode": GPUS},
    "image": {"model": {"source": {"image": {"reference": "r"}}}, "decode": GPUS,
              "topology": {"computeDomain": True}},
    "store": {"model": {"source": {"objectStore": {
        "uri": "s3://b/m", "claimName": "m", "secretName": "s"}}}, "decode": GPUS},
    "path": {"model": {"source": {"hostPath": {"path": "/m"}}}, "decode": GPUS,
             "topology": {"rdmaResource": "rdma/ib"}},
}  # fmt: skip
RESTRICTED = ("configMap", "emptyDir", "image", "persistentVolumeClaim", "secret")


def service(name: str) -> Service:
    spec = SERVICES[name]
    return parse({
        "metadata": {"name": "a" * 39, "namespace": "n" * 63, "uid": "u-0"},
        "spec": {**spec, "image": "i", "decode": {**spec["decode"], "nodes": 2},
                 "scheduling": {"tolerations": [{"operator": "Exists"}], "nodeSelector": {"a": "b"},
                                "priorityClassName": "p"},
                 "gateway": {"tlsSecret": "t"},
                 "observability": {"tracesEndpoint": "http://t:4318"}},
    })  # fmt: skip


def manifests(made: Service) -> Iterator[dict[str, Any]]:
    yield from (decode_pod(made, 1, 0, Slot("h")), prefill_pod(made, 1, 0))
    yield from (coordinator_pod(made, 10_000), gateway_deployment(made))
    yield from (gateway_service(made), coordinator_service(made, 1), headless_service(made))
    yield from (network_policy(made), disruption_budget(made, "prefill"))
    yield from pool_budgets(made, 1, 2)
    if made.spec.model.source.object_store is not None:
        yield hydration_job(made)


def pods(made: Service) -> Iterator[tuple[str, dict[str, Any]]]:
    for obj in manifests(made):
        if obj["kind"] in ("Deployment", "Job"):
            yield obj["metadata"]["name"], obj["spec"]["template"]["spec"]
        elif obj["kind"] == "Pod":
            yield obj["metadata"]["name"], obj["spec"]


@pytest.mark.parametrize("name", SERVICES)
def test_the_schema_knows_every_field(name: str) -> None:
    for obj in manifests(service(name)):
        kubernetes_validate.validate(obj, "1.36", strict=True)
        assert len(obj["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in obj["metadata"]["labels"].values())


@pytest.mark.parametrize("name", SERVICES)
def test_pods_keep_the_restricted_standard_where_they_can(name: str) -> None:
    """Host paths and IPC_LOCK for RDMA are what only privileged namespaces allow."""
    for pod, spec in pods(service(name)):
        assert spec["securityContext"]["runAsNonRoot"] is True, pod
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, pod
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, pod
            assert security["readOnlyRootFilesystem"] is True, pod
            assert security["capabilities"]["drop"] == ["ALL"], pod
            added = security["capabilities"].get("add", [])
            rdma = name == "path" and ("decode" in pod or "prefill" in pod)
            assert added == (["IPC_LOCK"] if rdma else []), pod
        kinds = {key for volume in spec["volumes"] for key in volume if key != "name"}
        allowed = {*RESTRICTED, "hostPath"} if name == "path" else set(RESTRICTED)
        assert kinds <= allowed, pod
        mounts = [m["mountPath"] for c in spec["containers"] for m in c["volumeMounts"]]
        assert len(set(mounts)) == len(mounts), pod
