"""Node objects as the API server gives them, and specs of pools."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tknp_operator.api.service import parse_spec
from tknp_operator.api.spec import Spec

Node = dict[str, Any]


@pytest.fixture(scope="session")
def make_node() -> Callable[..., Node]:
    """make_node("a", gpus=8, product=..., clique=..., rack=..., ready=...)"""

    def make(
        name: str, *, gpus: int = 4, product: str = "NVIDIA-H100-80GB-HBM3", clique: str = "",
        rack: str = "", rail: str = "", memory_mib: int = 81_559, rdma: int | None = None,
        ready: str = "True", since: str = "2026-01-01T00:00:00Z", cordoned: bool = False,
        deleting: bool = False, taints: tuple[str, ...] = (), cpu: str = "64",
        memory: str = "256Gi", **labels: str,
    ) -> Node:  # fmt: skip
        known = {
            "nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": str(memory_mib),
            "nvidia.com/gpu.clique": clique, "topology.kubernetes.io/rack": rack, "rail": rail,
        }  # fmt: skip
        allocatable = {"cpu": cpu, "memory": memory}
        if gpus:
            allocatable["nvidia.com/gpu"] = str(gpus)
        if rdma is not None:
            allocatable["rdma/ib"] = str(rdma)
        spec: Node = {}
        if cordoned:
            spec["unschedulable"] = True
        if taints:
            spec["taints"] = [{"key": key, "value": value, "effect": effect} for key, value, effect
                              in (taint.split(":") for taint in taints)]  # fmt: skip
        meta: Node = {"name": name, "labels": {k: v for k, v in known.items() if v} | labels}
        if deleting:
            meta["deletionTimestamp"] = since
        return {
            "metadata": meta, "spec": spec,
            "status": {"allocatable": allocatable, "conditions": [
                {"type": "Ready", "status": ready, "lastTransitionTime": since}]},
        }  # fmt: skip

    return make


@pytest.fixture(scope="session")
def make_spec() -> Callable[..., Spec]:
    """make_spec(nodes=4, ..., topology={...}): fields of decode, and other parts as mappings."""

    def make(**decode: Any) -> Spec:
        parts = {key: decode.pop(key) for key in ("topology", "scheduling", "timeouts", "model")
                 if key in decode}  # fmt: skip
        decode.setdefault("nodes", 4)
        if decode.get("device") != "cpu":
            decode.setdefault("tensorParallel", 4)
        model = {"source": {"hostPath": {"path": "/m"}}}
        return parse_spec({"image": "i", "model": model, "decode": decode, **parts})

    return make
