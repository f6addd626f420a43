"""The status that the operator writes: its schema, and conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

ConditionType = Literal["Placed", "Progressing", "Ready", "KVTransferVerified", "Degraded"]
CONDITIONS: Mapping[ConditionType, str] = {
    "Placed": "a node of the cluster is chosen for every node of the pool",
    "Progressing": "a pool starts, drains or changes its members",
    "Ready": "decode nodes and coordinator of the present epoch and a prefill replica are ready",
    "KVTransferVerified": "a prompt's KV has gone from prefill to every node, and steps ran on it",
    "Degraded": "it serves, but not as asked for (spares, prefill, domains, racks), or retries",
}
_STRING, _INTEGER = {"type": "string"}, {"type": "integer"}
_COUNTED = {"replicas": _INTEGER, "ready": _INTEGER, "selector": _STRING}


def _mapping(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), **more}


STATUS: dict[str, Any] = _mapping({
    "observedGeneration": {**_INTEGER, "description": "Of the spec that the rest speaks of."},
    "epoch": {**_INTEGER, "description": "Number of the present membership of the pool."},
    "compatibilityHash": {**_STRING, "description": "Equal for pods that may work together."},
    "prefill": _mapping(_COUNTED, description="Prefill pods: asked for, and ready."),
    "gateway": _mapping(_COUNTED, description="Gateway pods: asked for, and ready."),
    "nodes": {
        "type": "array", "x-kubernetes-list-type": "atomic",
        "description": "Each node of the pool: where it is, why there, what it roots.",
        "items": _mapping({
            "index": _INTEGER, "host": _STRING, "slot": _INTEGER, "role": _STRING,
            "layers": {**_STRING, "description": "Blocks that it roots."}, "ready": {
                "type": "boolean"}, "reason": _STRING,
        }),
    },
    "spares": {
        "type": "array", "items": _STRING, "x-kubernetes-list-type": "atomic",
        "description": "Nodes of the cluster that stand by for a lost one.",
    },
    "recommendation": {
        "type": "object", "x-kubernetes-preserve-unknown-fields": True,
        "description": "What the planner would change; nothing acts on it.",
    },
    "conditions": {
        "type": "array", "description": "See below.",
        "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
        "items": _mapping({
            "type": _STRING, "status": {"type": "string", "enum": ["True", "False", "Unknown"]},
            "observedGeneration": _INTEGER,
            "lastTransitionTime": {"type": "string", "format": "date-time"},
            "reason": _STRING, "message": _STRING,
        }, required=["type", "status", "lastTransitionTime", "reason", "message"]),
    },
})  # fmt: skip


def condition(
    prior: Sequence[Mapping[str, Any]], kind: ConditionType, holds: bool | None, reason: str,
    message: str, generation: int, now: str,
) -> dict[str, Any]:  # fmt: skip
    """A condition of `kind`. `holds` None: unknown. `now`: RFC 3339.

    The time of transition is that of `prior` while the status has not changed.
    """
    status = {True: "True", False: "False", None: "Unknown"}[holds]
    same = next((c for c in prior if c["type"] == kind and c["status"] == status), None)
    return {
        "type": kind, "status": status, "observedGeneration": generation,
        "lastTransitionTime": same["lastTransitionTime"] if same else now,
        "reason": reason, "message": message,
    }  # fmt: skip
