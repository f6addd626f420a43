"""How pods of a service are found, and how many of them may be taken away at once."""

from __future__ import annotations

from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.build.names import (
    CLIENT,
    COORDINATOR_PORT,
    EPOCH,
    HTTP_PORT,
    METRICS_PORT,
    MOST_RANKS,
    POOL,
    ROLE,
    metadata,
)


def headless_service(service: Service) -> dict[str, Any]:
    """Gives every pod of the pool a name, before it is ready: peers join by name."""
    return {
        "apiVersion": "v1", "kind": "Service",
        "metadata": metadata(service, f"{service.name}-pool", "pool"),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True,
                 "selector": {POOL: service.name}},
    }  # fmt: skip


def coordinator_service(service: Service, epoch: int) -> dict[str, Any]:
    """The public gRPC port, of the present epoch only."""
    return _service(service, "coordinator", "grpc", COORDINATOR_PORT, {EPOCH: str(epoch)})


def gateway_service(service: Service, more: dict[str, str] | None = None) -> dict[str, Any]:
    """The public HTTP port. `more`: labels that pods must have besides."""
    return _service(service, "gateway", "http", HTTP_PORT, more or {})


def network_policy(service: Service) -> dict[str, Any]:
    """Ports of the pool answer its own pods; the data plane asks nobody who they are.

    Besides: metrics, which ask for the pool's certificate, and the coordinator's gRPC port, which
    asks for a token, from pods of any namespace that carry the label tknp.io/client.
    """
    pool = {"podSelector": {"matchLabels": {POOL: service.name}}}
    client = {"namespaceSelector": {}, "podSelector": {"matchLabels": {CLIENT: "true"}}}
    metrics = {"port": METRICS_PORT, "endPort": METRICS_PORT + MOST_RANKS - 1, "protocol": "TCP"}
    return {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": metadata(service, f"{service.name}-pool", "pool"),
        "spec": {
            "podSelector": {
                "matchLabels": {POOL: service.name},
                "matchExpressions": [{"key": ROLE, "operator": "NotIn", "values": ["gateway"]}],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [pool]},
                {"ports": [metrics]},
                {"from": [client], "ports": [{"port": COORDINATOR_PORT, "protocol": "TCP"}]},
            ],
        },
    }  # fmt: skip


def disruption_budget(service: Service, role: str) -> dict[str, Any]:
    """Of prefill pods or gateways, of which one may be evicted at a time."""
    return _budget(service, role, {"maxUnavailable": 1}, {})


def pool_budgets(service: Service, epoch: int, nodes: int) -> list[dict[str, Any]]:
    """Decode pods and the coordinator of `epoch` may not be evicted: the pool would end.

    By number: for `maxUnavailable` Kubernetes takes the scale subresource of their owner as the
    number of pods expected, and that counts prefill. Of one epoch: beside another one, half of all
    could be evicted.
    """
    least = {"decode": nodes, "coordinator": 1}
    return [_budget(service, role, {"minAvailable": number}, {EPOCH: str(epoch)})
            for role, number in least.items()]  # fmt: skip


def _budget(
    service: Service, role: str, limit: dict[str, int], more: dict[str, str]
) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget",
        "metadata": metadata(service, f"{service.name}-{role}", role),
        "spec": {**limit, "selector": {"matchLabels": {POOL: service.name, ROLE: role, **more}}},
    }  # fmt: skip


def _service(
    service: Service, role: str, port_name: str, port: int, more: dict[str, str]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1", "kind": "Service",
        "metadata": metadata(service, f"{service.name}-{role}", role),
        "spec": {
            "selector": {POOL: service.name, ROLE: role, **more},
            "ports": [{"name": port_name, "port": port, "targetPort": port, "protocol": "TCP"}],
        },
    }  # fmt: skip
