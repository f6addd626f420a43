"""Gateways: pods of their own, or a RayService; and what scales by load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.build import ray_service
from tknp_operator.build.autoscaling import autoscalers
from tknp_operator.build.gateway import gateway_deployment
from tknp_operator.build.network import disruption_budget, gateway_service
from tknp_operator.build.secrets import trusted_by
from tknp_operator.plan.differ import applied
from tknp_operator.plan.observed import Observed, ending
from tknp_operator.plan.steps import Delete, Step

_OURS = (
    ("Deployment", "gateway"), ("RayService", "gateway"), ("Service", "gateway"),
    ("NetworkPolicy", "ray"), ("PodDisruptionBudget", "gateway"),
    ("HorizontalPodAutoscaler", "gateway"), ("HorizontalPodAutoscaler", "prefill"),
)  # fmt: skip


def by_kuberay(service: Service, served: frozenset[str]) -> bool:
    """Whether KubeRay runs the gateway. `served`: optional kinds that the cluster has."""
    gateway = service.spec.gateway
    if gateway.ray == "auto":  # only where it can do all that is asked for
        able = gateway.tls_secret is None and gateway.autoscaling is None
        return able and ray_service.KIND in served
    return gateway.ray == "rayService"


def gateway(
    service: Service, observed: Observed, shown: Mapping[str, Any] | None
) -> Iterable[Step]:
    """`shown`: the Secret of the pool's certificate."""
    wanted, ca = autoscalers(service), trusted_by(shown)
    if service.spec.gateway.enabled and by_kuberay(service, observed.served):
        wanted += [gateway_service(service, {ray_service.SERVES: "true"}),
                   ray_service.ray_policy(service),
                   ray_service.ray_service(service, ca)]  # fmt: skip
    elif service.spec.gateway.enabled:
        wanted += [gateway_service(service), gateway_deployment(service, ca),
                   disruption_budget(service, "gateway")]  # fmt: skip
    yield from applied(observed, wanted)
    names = {(o["kind"], o["metadata"]["name"]) for o in wanted}
    for kind, name in _OURS:
        full = f"{service.name}-{name}"
        seen = observed.get(kind, full)
        if seen is not None and (kind, full) not in names and not ending(seen):
            yield Delete(kind, full, seen["metadata"]["uid"])
