"""HorizontalPodAutoscalers of prefill and gateways; docs/autoscaling.md has the metrics."""

from __future__ import annotations

from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.api.serving import GatewayScaling, PrefillScaling
from tknp_operator.build.names import metadata


def autoscalers(service: Service) -> list[dict[str, Any]]:
    """One for each role that scales by load."""
    made = []
    prefill, gateway = service.spec.prefill.autoscaling, service.spec.gateway.autoscaling
    if prefill is not None:
        target = {"apiVersion": "tknp.io/v1alpha1", "kind": "TokenParallelService",
                  "name": service.name}  # fmt: skip
        made.append(_autoscaler(service, "prefill", target, prefill, "tknp_prefill_queue",
                                prefill.target_queue_per_replica))  # fmt: skip
    if gateway is not None and service.spec.gateway.enabled:
        target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{service.name}-gateway"}
        made.append(_autoscaler(service, "gateway", target, gateway, "tknp_gateway_streams",
                                gateway.target_streams_per_replica))  # fmt: skip
    return made


def _autoscaler(
    service: Service, role: str, target: dict[str, str],
    scaling: PrefillScaling | GatewayScaling, metric: str, average: int,
) -> dict[str, Any]:  # fmt: skip
    selector = {"matchLabels": {"namespace": service.namespace, "pool": service.name}}
    return {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
        "metadata": metadata(service, f"{service.name}-{role}", role),
        "spec": {
            "scaleTargetRef": target, "minReplicas": scaling.min_replicas,
            "maxReplicas": scaling.max_replicas,
            "metrics": [{"type": "External", "external": {
                "metric": {"name": metric, "selector": selector},
                "target": {"type": "AverageValue", "averageValue": str(average)}}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 300}},
        },
    }  # fmt: skip
