"""Where each kind lives in the API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tknp_operator.api.spec import GROUP, KIND, PLURAL, VERSION


@dataclass(frozen=True)
class Kind:
    """`prefix` and `plural` make the path. `ours`: only objects with our label are looked at."""

    name: str
    prefix: str
    plural: str
    namespaced: bool = True
    ours: bool = True

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        parts = [self.prefix]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        return "/".join(parts)


SERVICE = Kind(KIND, f"/apis/{GROUP}/{VERSION}", PLURAL, ours=False)
NODE = Kind("Node", "/api/v1", "nodes", namespaced=False, ours=False)
POD = Kind("Pod", "/api/v1", "pods", ours=False)  # others' pods hold GPUs
OWNED = (
    POD,
    Kind("ConfigMap", "/api/v1", "configmaps"),
    Kind("Secret", "/api/v1", "secrets"),
    Kind("Service", "/api/v1", "services"),
    Kind("Deployment", "/apis/apps/v1", "deployments"),
    Kind("Job", "/apis/batch/v1", "jobs"),
    Kind("NetworkPolicy", "/apis/networking.k8s.io/v1", "networkpolicies"),
    Kind("PodDisruptionBudget", "/apis/policy/v1", "poddisruptionbudgets"),
    Kind("HorizontalPodAutoscaler", "/apis/autoscaling/v2", "horizontalpodautoscalers"),
)
# Kinds of others, which a cluster may not have.
OPTIONAL = (
    Kind("ComputeDomain", "/apis/resource.nvidia.com/v1beta1", "computedomains"),
    Kind("RayService", "/apis/ray.io/v1", "rayservices"),
)
EVENT = Kind("Event", "/api/v1", "events")
CRD = Kind("CustomResourceDefinition", "/apis/apiextensions.k8s.io/v1",
           "customresourcedefinitions", namespaced=False)  # fmt: skip
KINDS: Mapping[str, Kind] = {
    kind.name: kind for kind in (*OWNED, *OPTIONAL, SERVICE, NODE, EVENT, CRD)
}
