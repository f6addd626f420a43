"""Names, labels and ports of everything that belongs to one service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.api.spec import GROUP, KIND, VERSION

COORDINATOR_PORT, DECODE_PORT, PREFILL_PORT = 50_051, 50_100, 50_200
DATA_PLANE_PORT, PREFILL_DATA_PLANE_PORT, METRICS_PORT, HTTP_PORT = 29_500, 29_600, 9400, 8000
MOST_RANKS = 16  # of one pod, and so of ports in a row
MANAGER = "tknp-operator"
POOL, EPOCH, ROLE, NODE, HASH = (f"{GROUP}/{key}" for key in
                                 ("pool", "epoch", "role", "node", "compatibility"))  # fmt: skip
CLIENT = f"{GROUP}/client"  # pods that may dial coordinators
FINALIZER, CLOSED, APPLIED = (f"{GROUP}/{key}" for key in ("drain", "closed", "applied"))
CERTIFICATE, CA = f"{GROUP}/certificate", f"{GROUP}/ca"  # annotations: digits of what is in use
PAUSED = f"{GROUP}/paused"  # annotation of a service that is left alone while it is "true"
POOL_DIRECTORY, SECRET_DIRECTORY = "/etc/tknp/pool", "/etc/tknp/internal"
KEYS_DIRECTORY, MODEL_DIRECTORY = "/etc/tknp/keys", "/models"


def labels(service: Service, role: str, **more: str) -> dict[str, str]:
    """Labels of a thing of `service`; `more` are ours too, by short name."""
    return {
        "app.kubernetes.io/name": "tknp", "app.kubernetes.io/instance": service.name,
        "app.kubernetes.io/component": role, "app.kubernetes.io/managed-by": MANAGER,
        POOL: service.name, ROLE: role, **{f"{GROUP}/{key}": value for key, value in more.items()},
    }  # fmt: skip


def metadata(service: Service, name: str, role: str, **more: str) -> dict[str, Any]:
    """Metadata of something that ends with `service`."""
    return {
        "name": name, "namespace": service.namespace, "labels": labels(service, role, **more),
        "ownerReferences": [{
            "apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": service.name,
            "uid": service.uid, "controller": True, "blockOwnerDeletion": True,
        }],
    }  # fmt: skip


def member(role: str, epoch: int, index: int = 0) -> str:
    """Host name of a pod of the pool: short, since its whole name is a label."""
    return f"{role}-{epoch}" if role == "coordinator" else f"{role}-{epoch}-{index}"


def domain(service: Service) -> str:
    """What the headless Service puts behind every host name."""
    return f"{service.name}-pool.{service.namespace}.svc"


def owned(service: Service, obj: Mapping[str, Any]) -> bool:
    """Whether `obj` belongs to this very object, not to an earlier one of the same name."""
    references = obj["metadata"].get("ownerReferences") or ()
    return any(reference.get("uid") == service.uid for reference in references)
