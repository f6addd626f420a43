"""What the operator may do in a cluster, by kind: the chart's RBAC says the same, no more, no less.

watched    where it looks after services: one namespace, or all
cluster    what has no namespace
own        its own namespace: whose turn it is
upgrade    `tknp-operator crds --apply` alone, under an account of its own
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tknp_operator.api.spec import GROUP, PLURAL

Scope = Literal["watched", "cluster", "own", "upgrade"]
_MADE = ("list", "watch", "create")  # never changed, and gone with the service
_KEPT = ("get", "list", "watch", "create", "patch", "delete")


@dataclass(frozen=True)
class Right:
    """`verbs` on `resource` (`plural`, `plural/subresource`) of API group `group`.

    All but `create` may be narrowed to names where one name is known beforehand.
    """

    scope: Scope
    group: str
    resource: str
    verbs: tuple[str, ...]


RIGHTS: tuple[Right, ...] = (
    Right("watched", GROUP, PLURAL, ("list", "watch", "patch")),  # patch: finalizers
    Right("watched", GROUP, f"{PLURAL}/status", ("patch",)),
    # Where OwnerReferencesPermissionEnforcement is on: owned objects block the owner's deletion.
    Right("watched", GROUP, f"{PLURAL}/finalizers", ("update",)),
    Right("watched", "", "pods", (*_MADE, "delete")),
    Right("watched", "batch", "jobs", _MADE),
    Right("watched", "", "configmaps", _KEPT),
    Right("watched", "", "secrets", (*_MADE, "patch")),
    Right("watched", "", "services", _KEPT),
    Right("watched", "apps", "deployments", _KEPT),
    Right("watched", "networking.k8s.io", "networkpolicies", _KEPT),
    Right("watched", "policy", "poddisruptionbudgets", _KEPT),
    Right("watched", "autoscaling", "horizontalpodautoscalers", _KEPT),
    Right("watched", "resource.nvidia.com", "computedomains",
          ("get", "list", "watch", "create", "patch")),
    Right("watched", "ray.io", "rayservices", _KEPT),
    Right("watched", "", "events", ("create",)),
    Right("cluster", "", "nodes", ("list", "watch")),
    Right("own", "coordination.k8s.io", "leases", ("get", "create", "update")),
    Right("upgrade", "apiextensions.k8s.io", "customresourcedefinitions",
          ("get", "create", "patch")),
)  # fmt: skip
