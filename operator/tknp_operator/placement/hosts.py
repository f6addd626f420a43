"""What a cluster offers: Node objects read into hosts, and hosts cut into slots of T GPUs.

A host is unusable for one reason at a time, the first that holds; the reason is shown to users who
ask why a pool is not placed. What is on a host already may often stay where nothing new may come:

    not Ready, for less than nodeLostSeconds     stays: it may be back at once
    cordoned, or a NoSchedule taint              leaves when there is another place for it
    anything else                                is lost

GPUs that other pods have asked for are not offered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from tknp_operator.api.spec import Spec
from tknp_operator.placement.products import product_name, whole, wrong_product

GPU = "nvidia.com/gpu"
MEMORY = "nvidia.com/gpu.memory"  # MiB of one
CPU_SLOTS = 64  # most decode nodes that share a host where nobody asks for GPUs
_SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18,
             "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
             "Ei": 2.0**60}  # fmt: skip

Stays = Literal["no", "until replaced", "yes"]


@dataclass(frozen=True)
class Host:
    """A node of the cluster.

    `slots`: decode nodes that fit. `unusable`: why no new one may come, or empty; `stays`: whether
    one that is there already may stay all the same. `memory_bytes` of each GPU; 0: not known.
    """

    name: str
    product: str = ""
    slots: int = 0
    domain: str = ""
    rack: str = ""
    rail: str = ""
    unusable: str = ""
    stays: Stays = "no"
    memory_bytes: int = 0


def read_hosts(
    nodes: Sequence[Mapping[str, Any]], spec: Spec, used_gpus: Mapping[str, int],
    now: datetime | None = None,
) -> tuple[Host, ...]:  # fmt: skip
    """Hosts in order of name. `used_gpus`: by node, those that pods of others have.

    Without `now` a node that is not Ready is lost at once.
    """
    return tuple(
        read_host(node, spec, used_gpus.get(node["metadata"]["name"], 0), now)
        for node in sorted(nodes, key=lambda node: str(node["metadata"]["name"]))
    )


def read_host(
    node: Mapping[str, Any], spec: Spec, used_gpus: int = 0, now: datetime | None = None
) -> Host:
    """One host. `node`: a v1 Node as the API server gives it."""
    labels = node["metadata"].get("labels") or {}
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    topology = spec.topology
    cuda = spec.decode.device == "cuda"
    slots, short = _slots(spec, allocatable, used_gpus)
    lost = _lost(node, spec, labels) or short
    unusable, stays = _unwelcome(node, spec, now)
    if lost:
        unusable, stays = lost, "no"
    return Host(
        name=node["metadata"]["name"], product=product_name(labels) if cuda else "cpu",
        slots=slots, domain=labels.get(topology.nvlink_domain_label, ""),
        rack=labels.get(topology.rack_label, ""),
        rail=labels.get(topology.rail_label, "") if topology.rail_label else "",
        unusable=unusable, stays=stays,
        memory_bytes=_integer(labels.get(MEMORY)) << 20 if cuda else 0,
    )  # fmt: skip


def _slots(spec: Spec, allocatable: Mapping[str, Any], used_gpus: int) -> tuple[int, str]:
    """Decode nodes that fit on a host, and what it has too little of, if for none."""
    decode = spec.decode
    fits: dict[str, int] = {}
    if decode.device == "cuda":
        tp, rdma = decode.tensor_parallel, spec.topology.rdma_resource
        fits[f"{tp} free {GPU}"] = max(_integer(allocatable.get(GPU)) - used_gpus, 0) // tp
        if rdma:
            fits[f"{tp} {rdma}"] = _integer(allocatable.get(rdma)) // tp
    else:
        fits[f"{CPU_SLOTS} pods"] = CPU_SLOTS
    for resource, amount in decode.resources.requests.items():
        if resource in ("cpu", "memory") and (asked := quantity(amount)) > 0:
            fits[f"{amount} {resource}"] = int(quantity(allocatable.get(resource, 0)) // asked)
    slots = min(fits.values())
    short = next((what for what, count in fits.items() if count < 1), "")
    return slots, f"has fewer than {short}" if short else ""


def _lost(node: Mapping[str, Any], spec: Spec, labels: Mapping[str, str]) -> str:
    """Why a pod that is there can't go on, or not be there again; empty if it can."""
    if "deletionTimestamp" in node["metadata"]:
        return "is being deleted"
    for key, value in spec.scheduling.node_selector.items():
        if labels.get(key) != value:
            return f"lacks the label {key}={value}"
    if not _not_ready(node) and (taint := _taint(node, spec, "NoExecute")):
        return taint
    if spec.decode.device == "cpu":
        return ""
    return wrong_product(labels, spec.decode.gpu_products) or whole(labels)


def _unwelcome(
    node: Mapping[str, Any], spec: Spec, now: datetime | None
) -> tuple[str, Stays]:  # fmt: skip
    """Why nothing new may come, and whether what is there stays."""
    if condition := _not_ready(node):
        since = condition.get("lastTransitionTime")
        brief = now is not None and since is not None and (
            now - datetime.fromisoformat(since)
        ).total_seconds() < spec.timeouts.node_lost_seconds  # fmt: skip
        return "is not Ready", "yes" if brief else "no"
    if (node.get("spec") or {}).get("unschedulable"):
        return "is cordoned", "until replaced"
    if taint := _taint(node, spec, "NoSchedule"):
        return taint, "until replaced"
    return "", "yes"


def _not_ready(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The Ready condition where it is not true."""
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready: Mapping[str, Any] = next((c for c in conditions if c["type"] == "Ready"),
                                    {"status": "Unknown"})  # fmt: skip
    return None if ready["status"] == "True" else ready


def _taint(node: Mapping[str, Any], spec: Spec, effect: str) -> str:
    for taint in (node.get("spec") or {}).get("taints") or ():
        if taint["effect"] == effect and not any(
            tolerates(toleration, taint) for toleration in spec.scheduling.tolerations
        ):
            return f"has the taint {taint['key']}:{effect}, which nothing tolerates"
    return ""


def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Kubernetes' own rule for one toleration and one taint."""
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (
        (toleration.get("value") or "") == (taint.get("value") or "")
    )


def quantity(text: object) -> float:
    """`500m` -> 0.5, `16Gi` -> 17179869184.0; what is no quantity counts as none."""
    match = re.fullmatch(r"([0-9.]+(?:[eE][0-9]+)?)([A-Za-z]{0,2})", str(text))
    return float(match[1]) * _SUFFIXES.get(match[2], 0.0) if match else 0.0


def _integer(text: object) -> int:
    """Whole units of a resource that has only whole units; other text counts as none."""
    return int(str(text)) if str(text).isdigit() else 0
