"""The status of a service, from what is there and what has been decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tknp_operator.api.service import Service
from tknp_operator.api.spec import GROUP
from tknp_operator.api.status import condition
from tknp_operator.build.names import POOL, ROLE
from tknp_operator.placement.layers import layers_of, layout_of
from tknp_operator.placement.place import Placement
from tknp_operator.plan.observed import Epoch, Object, Observed, label, ready, trouble

_NOT_PLACED = ("NotPlaced", "Invalid")


@dataclass(frozen=True)
class Outcome:
    """What a round has come to. Without a reason nothing stands in the way."""

    reason: str
    message: str


def status_of(
    service: Service, observed: Observed, now: datetime, outcome: Outcome,
    placed: Placement | None, current: Epoch | None,
) -> dict[str, Any]:  # fmt: skip
    """The whole status; equal to the one before while nothing has changed."""
    spec, number = service.spec, current.number if current else 0
    pods = {role: observed.pods(role, number) for role in ("decode", "coordinator", "prefill")}
    up = {role: sum(map(ready, found)) for role, found in pods.items()}
    surging = outcome.reason == "Surging"
    deciding = outcome.reason and outcome.reason not in ("Changing", "Surging")
    serves = (
        not deciding and up["decode"] >= spec.decode.nodes and up["coordinator"] > 0
        and up["prefill"] > 0 and outcome.reason != "Changing"
    )  # fmt: skip
    result: dict[str, Any] = {
        "observedGeneration": service.generation,
        "epoch": number,
        "compatibilityHash": current.compatibility if current else "",
        "prefill": {
            "replicas": len(pods["prefill"]), "ready": up["prefill"],
            "selector": f"{POOL}={service.name},{ROLE}=prefill",
        },
        "gateway": {
            **_gateway(service, observed), "selector": f"{POOL}={service.name},{ROLE}=gateway",
        },
        "nodes": _nodes(service, pods["decode"], placed, outcome),
        "spares": [slot.host for slot in placed.spares] if placed else [],
    }  # fmt: skip
    if "recommendation" in service.prior:  # somebody else's word, which is kept
        result["recommendation"] = service.prior["recommendation"]
    missing = _missing(service, outcome, pods, up)
    prior, stamp = service.prior.get("conditions") or (), now.strftime("%Y-%m-%dT%H:%M:%SZ")
    short = list(placed.warnings) if placed is not None else []
    if up["prefill"] < spec.prefill.replicas:
        short.append(f"{up['prefill']} of {spec.prefill.replicas} prefill replicas are ready")
    facts = (
        ("Placed", outcome.reason not in _NOT_PLACED if placed or outcome.reason in _NOT_PLACED
         else None, "Placed" if placed else outcome.reason or "Unknown",
         "; ".join(placed.warnings) if placed else outcome.message),
        ("Progressing", bool(not deciding and (surging or not serves)), outcome.reason or
         ("Done" if serves else "Starting"), outcome.message if outcome.reason else missing),
        ("Ready", serves, "Serving" if serves else outcome.reason or "NotReady",
         f"epoch {number} serves" if serves else missing),
        ("KVTransferVerified", up["coordinator"] > 0,
         "WarmedUp" if up["coordinator"] else "NotReady",
         "before it was ready, the coordinator sent a prompt through prefill to every node"
         if up["coordinator"] else "the coordinator is not ready: it tries the way first"),
        ("Degraded", bool(serves and short), "Short" if serves and short else "None",
         "; ".join(short) if serves else ""),
    )  # fmt: skip
    result["conditions"] = [
        condition(prior, kind, holds, reason, message, service.generation, stamp)  # type: ignore[arg-type]
        for kind, holds, reason, message in facts
    ]
    return result


def _gateway(service: Service, observed: Observed) -> dict[str, int]:
    """Its pods, as its Deployment or RayService counts them."""
    name = f"{service.name}-gateway"
    if ray := observed.get("RayService", name):
        groups = ray["spec"]["rayClusterConfig"]["workerGroupSpecs"]
        ready_pods = (ray.get("status") or {}).get("numServeEndpoints", 0)
        return {"replicas": sum(group["replicas"] for group in groups), "ready": ready_pods}
    status = (observed.get("Deployment", name) or {}).get("status") or {}
    return {"replicas": status.get("replicas", 0), "ready": status.get("readyReplicas", 0)}


def _nodes(
    service: Service, pods: Sequence[Object], placed: Placement | None, outcome: Outcome
) -> list[dict[str, Any]]:
    if placed is None or outcome.reason == "Surging":  # what `placed` says is of another epoch
        kept = outcome.reason in ("NotPlaced", "Surging")
        return list(service.prior.get("nodes") or []) if kept else []
    layout = layout_of(service.spec, placed.memories)
    by_index = {label(pod, f"{GROUP}/node"): pod for pod in pods}
    return [
        {
            "index": node.index, "host": node.slot.host, "slot": node.slot.number,
            "role": service.spec.decode.role(node.index), "layers": layers_of(layout, node.index),
            "ready": str(node.index) in by_index and ready(by_index[str(node.index)]),
            "reason": node.reason.replace("stays on", "chosen on"),
        }
        for node in placed.nodes
    ]  # fmt: skip


def _missing(
    service: Service, outcome: Outcome, pods: dict[str, list[Object]], up: dict[str, int]
) -> str:
    """What a pool waits for, in one line."""
    if outcome.reason and outcome.reason != "Surging":
        return outcome.message
    parts = [f"{up['decode']} of {service.spec.decode.nodes} decode nodes are ready"]
    if not up["coordinator"]:
        parts.append("the coordinator is not")
    if not up["prefill"]:
        parts.append("no prefill replica is")
    for pod in (pod for found in pods.values() for pod in found if not ready(pod)):
        if reason := trouble(pod):
            parts.append(f"{pod['metadata']['name']}: {reason}")
            break
    return "; ".join(parts)
