"""Subresources that are objects of their own: the scale of a resource, the eviction of a pod."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from .api import Api, Object, stale
from .errors import Refused
from .kinds import Kind


def scale(kind: Kind, obj: Object) -> Object:
    """The Scale of `obj`. Raises Refused 404 for a kind without one."""
    if kind.scale is None:
        raise Refused(404, "the server could not find the requested resource")
    spec, status, selector = (_at(obj, path) for path in kind.scale)
    metadata = obj["metadata"]
    kept = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
    return {
        "apiVersion": "autoscaling/v1", "kind": "Scale",
        "metadata": {part: metadata[part] for part in kept if part in metadata},
        "spec": {"replicas": spec or 0},
        "status": {"replicas": status or 0, **({"selector": selector} if selector else {})},
    }  # fmt: skip


def rescale(api: Api, kind: Kind, obj: Object, wanted: Object, manager: str) -> Object:
    """Write the replicas of `wanted` into `obj`; returns the new Scale."""
    with api.store.lock:
        assert kind.scale is not None
        new, sent = deepcopy(obj), wanted["metadata"].get("resourceVersion")
        if sent and sent != obj["metadata"]["resourceVersion"]:
            raise stale(kind, obj["metadata"]["name"])
        *parents, last = kind.scale[0].strip(".").split(".")
        node = new
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = int(wanted["spec"].get("replicas", 0))
        return scale(kind, api.changed(kind, obj, new, manager, ""))


def evict(api: Api, namespace: str, name: str, options: Object) -> Object:
    """Delete a pod unless a PodDisruptionBudget has no disruption to give: then 429."""
    pods = api.kinds["", "v1", "pods"]
    pod = api.get(pods, namespace, name)
    for budget in api.store.all(("policy", "poddisruptionbudgets"), namespace):
        wanted = (budget["spec"].get("selector") or {}).get("matchLabels") or {}
        have = pod["metadata"].get("labels") or {}
        covered = wanted.items() <= have.items()
        if covered and not (budget.get("status") or {}).get("disruptionsAllowed", 0):
            raise Refused(429, "Cannot evict pod as it would violate the pod's disruption "
                               "budget.")  # fmt: skip
    api.delete(pods, namespace, name, options)
    return {"apiVersion": "v1", "kind": "Status", "status": "Success", "code": 201}


def _at(obj: Object, path: str) -> Any:
    value: Any = obj
    for part in filter(None, path.split(".")):
        value = (value or {}).get(part)
    return value if path else None
