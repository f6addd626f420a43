"""What is there of one service, read from plain objects. Never remembers anything.

Epochs are counted by their ConfigMaps: the highest is the present one, whatever else is left of
others. An object that belongs to an earlier service of the same name is not ours.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.build.names import CERTIFICATE, CLOSED, EPOCH, HASH, NODE, ROLE, owned
from tknp_operator.placement.place import Slot

Object = Mapping[str, Any]


@dataclass(frozen=True)
class Observed:
    """`objects[kind]`: those of the service, owned by it. `nodes`: all of the cluster.

    `used_gpus`: by node, GPUs of other pods. `served`: optional kinds that the cluster has.
    """

    objects: Mapping[str, Sequence[Object]]
    nodes: Sequence[Object]
    used_gpus: Mapping[str, int]
    served: frozenset[str] = frozenset()

    def get(self, kind: str, name: str) -> Object | None:
        return next((o for o in self.objects.get(kind, ()) if o["metadata"]["name"] == name), None)

    def pods(self, role: str = "", epoch: int | None = None) -> list[Object]:
        """In order of epoch and index."""
        return sorted(
            (pod for pod in self.objects.get("Pod", ())
             if (not role or label(pod, ROLE) == role)
             and (epoch is None or label(pod, EPOCH) == str(epoch))),
            key=lambda pod: (int(label(pod, EPOCH) or 0), int(label(pod, NODE) or 0)),
        )  # fmt: skip


def of_service(
    service: Service, objects: Mapping[str, Iterable[Object]]
) -> dict[str, list[Object]]:
    """Only what this very service owns."""
    return {kind: [o for o in found if owned(service, o)] for kind, found in objects.items()}


def label(obj: Object, key: str) -> str:
    return str((obj["metadata"].get("labels") or {}).get(key, ""))


def annotation(obj: Object, key: str) -> str:
    return str((obj["metadata"].get("annotations") or {}).get(key, ""))


@dataclass(frozen=True)
class Epoch:
    """One membership: its number, its hash, where its nodes are.

    `certificate`: digits of what its pods show each other; empty: nobody knows.
    `closed`: why it ends; written down before anything of it is deleted, so that whoever looks
    next goes on ending it instead of making it whole again.
    """

    number: int
    compatibility: str
    slots: tuple[Slot, ...]
    closed: str = ""
    certificate: str = ""


def epochs(observed: Observed) -> list[Epoch]:
    """All that have a ConfigMap, oldest first."""
    found = []
    for config_map in observed.objects.get("ConfigMap", ()):
        number = label(config_map, EPOCH)
        if number:
            slots = json.loads((config_map.get("data") or {}).get("slots.json", "[]"))
            found.append(Epoch(int(number), label(config_map, HASH),
                               tuple(Slot(host, part) for host, part in slots),
                               annotation(config_map, CLOSED),
                               annotation(config_map, CERTIFICATE)))  # fmt: skip
    return sorted(found, key=lambda epoch: epoch.number)


def ending(obj: Object) -> bool:
    return "deletionTimestamp" in obj["metadata"]


def ready(pod: Object) -> bool:
    """Its readiness, which is the service's own; a pod on its way out is never ready."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return not ending(pod) and any(
        c["type"] == "Ready" and c["status"] == "True" for c in conditions
    )


def finished(pod: Object) -> bool:
    """Whether it can't come back by itself: evicted, or its node gave it up."""
    return (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded")


def trouble(pod: Object) -> str:
    """Why a pod is not ready, in its own words; empty if it says nothing."""
    status = pod.get("status") or {}
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"not scheduled: {condition.get('message', '')}".rstrip(": ")
    for container in status.get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return ""


def lost_since(node: Object) -> datetime | None:
    """Since when a node is not Ready; None while it is."""
    for condition in (node.get("status") or {}).get("conditions") or ():
        if condition["type"] == "Ready" and condition["status"] != "True":
            return parse_time(condition.get("lastTransitionTime", "1970-01-01T00:00:00Z"))
    return None


def parse_time(text: str) -> datetime:
    """RFC 3339 as Kubernetes writes it."""
    return datetime.fromisoformat(str(text).replace("Z", "+00:00"))
