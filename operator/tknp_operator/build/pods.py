"""Pods of one epoch: decode nodes, the coordinator, prefill replicas.

A decode node is one container with all its T GPUs, so that its ranks reach one another by NVLink;
`tknp serve` starts a process a rank. Pods are pinned to the hosts that placement chose, restart
their container in place while their epoch lasts, and end by SIGTERM, which drains.
"""

from __future__ import annotations

from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.api.values import Resources
from tknp_operator.build.compute_domain import claim_template_name
from tknp_operator.build.names import (
    COORDINATOR_PORT,
    DECODE_PORT,
    HASH,
    METRICS_PORT,
    MODEL_DIRECTORY,
    POOL_DIRECTORY,
    PREFILL_PORT,
    SECRET_DIRECTORY,
    domain,
    member,
    metadata,
)
from tknp_operator.build.pool import compatibility, model_path
from tknp_operator.build.secrets import internal_volume
from tknp_operator.placement.hosts import GPU
from tknp_operator.placement.place import Slot

UID = 10_001
GRACE_S = 30  # beyond draining: to end processes and free the GPUs
_PROBE_S = 5


def decode_pod(service: Service, epoch: int, node: int, slot: Slot) -> dict[str, Any]:
    """Node `node` of the pool, on `slot`."""
    decode = service.spec.decode
    command = ["tknp", "serve", decode.role(node), "--node", str(node)]
    return _pod(service, "decode", epoch, node, command, decode.resources,
                ranks=decode.tensor_parallel, host=slot.host)  # fmt: skip


def prefill_pod(service: Service, epoch: int, replica: int) -> dict[str, Any]:
    """Prefill replica `replica`; Kubernetes chooses where."""
    prefill = service.spec.prefill
    command = ["tknp", "serve", "prefill", "--replica", str(replica)]
    return _pod(service, "prefill", epoch, replica, command, prefill.resources,
                ranks=prefill.tensor_parallel)  # fmt: skip


def coordinator_pod(service: Service, epoch: int) -> dict[str, Any]:
    """The coordinator: no GPU, anywhere."""
    command = ["tknp", "serve", "coordinator"]
    return _pod(service, "coordinator", epoch, 0, command, Resources(), ranks=0)


def _pod(
    service: Service, role: str, epoch: int, index: int, command: list[str],
    resources: Resources, *, ranks: int, host: str = "",
) -> dict[str, Any]:  # fmt: skip
    spec, hostname = service.spec, member(role, epoch, index)
    cuda = spec.decode.device == "cuda" and ranks > 0
    rdma = spec.topology.rdma_resource if cuda else ""
    amounts = resources.model_dump()
    if cuda:
        for kind in ("requests", "limits"):
            amounts[kind] = {**amounts[kind], GPU: ranks, **({rdma: ranks} if rdma else {})}
    ports = {"decode": DECODE_PORT, "prefill": PREFILL_PORT, "coordinator": COORDINATOR_PORT}
    name = f"{hostname}.{domain(service)}"
    probed = [f"{name}:{ports[role] + t}" for t in range(max(ranks, 1))]
    volumes, mounts = _volumes(service, epoch)
    container: dict[str, Any] = {
        "name": role, "image": spec.image, "imagePullPolicy": spec.image_pull_policy,
        "command": command,
        "env": [
            {"name": "TKNP_POOL", "value": f"{POOL_DIRECTORY}/pool.yaml"},
            {"name": "XDG_CACHE_HOME", "value": "/cache"}, {"name": "HOME", "value": "/tmp"},
            *([{"name": "UCX_CUDA_IPC_ENABLE_MNNVL", "value": "y"}]
              if spec.topology.compute_domain and cuda else []),
        ],
        "resources": {kind: values for kind, values in amounts.items() if values},
        "ports": _ports(service, ports[role], max(ranks, 1)),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if rdma else {})},
        },
        "startupProbe": _probe("alive", probed, -(-spec.timeouts.start_seconds // _PROBE_S)),
        "readinessProbe": _probe("ready", probed, 2),
        "livenessProbe": _probe("alive", probed, 6),
    }  # fmt: skip
    pod: dict[str, Any] = {
        "hostname": hostname, "subdomain": f"{service.name}-pool", "restartPolicy": "Always",
        "terminationGracePeriodSeconds": spec.drain.seconds + GRACE_S,
        "automountServiceAccountToken": False, "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": UID, "runAsGroup": UID, "fsGroup": UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secrets],
        "nodeSelector": dict(spec.scheduling.node_selector),
        "tolerations": list(spec.scheduling.tolerations),
        "containers": [container], "volumes": volumes,
    }  # fmt: skip
    if host:  # by affinity, not nodeName, so that the scheduler counts the GPUs
        pod["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchFields": [
                {"key": "metadata.name", "operator": "In", "values": [host]}]}]}}}  # fmt: skip
    if spec.scheduling.priority_class_name:
        pod["priorityClassName"] = spec.scheduling.priority_class_name
    if spec.topology.compute_domain and cuda and role == "decode":
        claim = claim_template_name(service)
        pod["resourceClaims"] = [{"name": "imex", "resourceClaimTemplateName": claim}]
        container["resources"]["claims"] = [{"name": "imex"}]
    meta = metadata(service, f"{service.name}-{hostname}", role, epoch=str(epoch), node=str(index))
    meta["annotations"] = {HASH: compatibility(service)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": pod}


def _ports(service: Service, first: int, ranks: int) -> list[dict[str, Any]]:
    """Of every rank: what its peers dial, and its metrics, which a PodMonitor finds by name."""
    kinds = [("rank", first)]
    if service.spec.observability.metrics:
        kinds.append(("metrics", METRICS_PORT))
    return [{"name": f"{kind}-{t}", "containerPort": port + t} for kind, port in kinds
            for t in range(ranks)]  # fmt: skip


def _probe(question: str, addresses: list[str], failures: int) -> dict[str, Any]:
    """All ranks must say yes. Exec, since Kubernetes' own gRPC probe speaks no TLS."""
    return {
        "exec": {"command": ["tknp", "probe", question, *addresses]},
        "periodSeconds": _PROBE_S, "timeoutSeconds": _PROBE_S, "failureThreshold": failures,
    }  # fmt: skip


def _volumes(service: Service, epoch: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    volumes: list[dict[str, Any]] = [
        {"name": "pool", "configMap": {"name": f"{service.name}-pool-{epoch}"}},
        internal_volume(service),
        {"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]  # fmt: skip
    mounts: list[dict[str, Any]] = [
        {"name": "pool", "mountPath": POOL_DIRECTORY, "readOnly": True},
        {"name": "internal", "mountPath": SECRET_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"}, {"name": "cache", "mountPath": "/cache"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]  # fmt: skip
    source = service.spec.model.source
    where = MODEL_DIRECTORY
    if source.builtin is not None:
        return volumes, mounts
    if source.host_path is not None:
        kind: dict[str, Any] = {"hostPath": {"path": source.host_path.path}}
        where = model_path(service.spec)
    elif source.image is not None:
        kind = {"image": {"reference": source.image.reference,
                          "pullPolicy": source.image.pull_policy}}  # fmt: skip
    else:
        claim = source.pvc or source.object_store
        name = claim.claim_name if claim is not None else ""
        kind = {"persistentVolumeClaim": {"claimName": name, "readOnly": True}}
    volumes.append({"name": "model", **kind})
    mounts.append({"name": "model", "mountPath": where, "readOnly": True})
    return volumes, mounts
