"""What a cluster offers: Node objects read into hosts, and hosts cut into slots of T GPUs.

A host is unusable for one reason at a time, the first that holds; the reason is shown to users who
ask why a pool is not placed. GPUs that other pods have asked for are not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tknp_operator.api.spec import Spec

GPU = "nvidia.com/gpu"
PRODUCT = "nvidia.com/gpu.product"
CPU_SLOTS = 64  # decode nodes that may share a host where nobody asks for GPUs
_PRODUCTS = ("GB300", "GB200", "B300", "B200", "GH200", "H200", "H100", "H800", "A100", "L40S")


@dataclass(frozen=True)
class Host:
    """A node of the cluster. `slots`: decode nodes that fit; `unusable`: why none may, or empty."""

    name: str
    product: str = ""
    slots: int = 0
    domain: str = ""
    rack: str = ""
    rail: str = ""
    unusable: str = ""


def product_class(label: str) -> str:
    """The family of a value of nvidia.com/gpu.product; longer names are tried first."""
    upper = label.upper()
    return next((name for name in _PRODUCTS if name in upper), upper)


def read_hosts(
    nodes: Sequence[Mapping[str, Any]], spec: Spec, used_gpus: Mapping[str, int]
) -> tuple[Host, ...]:
    """Hosts in order of name. `used_gpus`: by node, those that pods of others have."""
    return tuple(
        read_host(node, spec, used_gpus.get(node["metadata"]["name"], 0))
        for node in sorted(nodes, key=lambda node: str(node["metadata"]["name"]))
    )


def read_host(node: Mapping[str, Any], spec: Spec, used_gpus: int = 0) -> Host:
    """One host. `node`: a v1 Node as the API server gives it."""
    labels = node["metadata"].get("labels") or {}
    allocatable = (node.get("status") or {}).get("allocatable") or {}
    tp, topology = spec.decode.tensor_parallel, spec.topology
    if spec.decode.device == "cpu":
        slots, product = CPU_SLOTS, "cpu"
    else:
        slots = max(_integer(allocatable.get(GPU)) - used_gpus, 0) // tp
        product = product_class(labels.get(PRODUCT, ""))
    return Host(
        name=node["metadata"]["name"], product=product, slots=slots,
        domain=labels.get(topology.nvlink_domain_label, ""),
        rack=labels.get(topology.rack_label, ""),
        rail=labels.get(topology.rail_label, "") if topology.rail_label else "",
        unusable=_why_not(node, spec, labels, allocatable, slots),
    )  # fmt: skip


def _why_not(
    node: Mapping[str, Any], spec: Spec, labels: Mapping[str, str],
    allocatable: Mapping[str, Any], slots: int,
) -> str:  # fmt: skip
    decode, node_spec = spec.decode, node.get("spec") or {}
    if "deletionTimestamp" in node["metadata"]:
        return "is being deleted"
    conditions = (node.get("status") or {}).get("conditions") or ()
    ready = next((c["status"] for c in conditions if c["type"] == "Ready"), "Unknown")
    if ready != "True":
        return "is not Ready"
    if node_spec.get("unschedulable"):
        return "is cordoned"
    for key, value in spec.scheduling.node_selector.items():
        if labels.get(key) != value:
            return f"lacks the label {key}={value}"
    for taint in node_spec.get("taints") or ():
        if taint["effect"] in ("NoSchedule", "NoExecute") and not any(
            tolerates(toleration, taint) for toleration in spec.scheduling.tolerations
        ):
            return f"has the taint {taint['key']}:{taint['effect']}, which nothing tolerates"
    if decode.device == "cpu":
        return ""
    label = labels.get(PRODUCT, "")
    if decode.gpu_products and not any(allowed(label, name) for name in decode.gpu_products):
        return f"has {label or 'no'} GPUs, not {' or '.join(decode.gpu_products)}"
    if slots < 1:
        return f"has fewer than {decode.tensor_parallel} free {GPU}"
    rdma = spec.topology.rdma_resource
    if rdma and _integer(allocatable.get(rdma)) < decode.tensor_parallel:
        return f"has fewer than {decode.tensor_parallel} {rdma}"
    return ""


def allowed(label: str, wanted: str) -> bool:
    """Whether `label` is the product `wanted`, its class (H100) or has it as a part."""
    return wanted == label or (
        product_class(label) == product_class(wanted)
        if product_class(wanted) in _PRODUCTS and wanted.upper() in _PRODUCTS
        else wanted.upper() in label.upper()
    )


def tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    """Kubernetes' own rule for one toleration and one taint."""
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (
        (toleration.get("value") or "") == (taint.get("value") or "")
    )


def _integer(quantity: object) -> int:
    """Whole units of a resource that has only whole units; other text counts as none."""
    text = str(quantity or 0)
    return int(text) if text.isdigit() else 0
