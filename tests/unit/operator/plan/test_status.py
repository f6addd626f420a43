"""What a service says of itself, and what of it reaches the pool file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from tknp.config import pool_from
from tknp_operator.placement.layers import layout_of


def test_the_way_of_kv_is_known_once_the_coordinator_has_tried_it(world: Any) -> None:
    for _ in range(3):
        world.tick()
    assert world.condition("KVTransferVerified")["status"] == "False"
    for pod in world.pods("decode").values():
        pod["status"] = {"conditions": [{"type": "Ready", "status": "True"}]}
    world.tick()
    assert (
        world.condition("KVTransferVerified")["status"] == "False"
    )  # processes that run prove nothing
    world.settle()
    assert world.condition("KVTransferVerified")["status"] == "True"
    world.service["spec"]["suspend"] = True
    world.settle()
    assert world.condition("KVTransferVerified")["status"] == "False"


def test_whatever_placement_warns_of_is_degraded(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    spec["decode"] |= {"copies": 2}
    world = make_world(spec)
    for node in world.nodes.values():
        node["metadata"]["labels"] = {"topology.kubernetes.io/rack": "r"}
    world.settle()
    degraded = world.condition("Degraded")
    assert degraded["status"] == "True"
    assert degraded["reason"] == "Short"
    assert "dual roots 0 and 1 share a rack" in degraded["message"]
    world.nodes["h1"]["metadata"]["labels"] = {"topology.kubernetes.io/rack": "q"}
    world.settle()
    assert world.condition("Degraded")["status"] == "False"


def test_a_recommendation_is_kept_as_it_is(world: Any) -> None:
    """Whoever writes it (a planner) owns it; the operator acts on none of it."""
    world.settle()
    world.service["status"]["recommendation"] = {"decode": {"nodes": 4}, "why": "p99"}
    assert world.plan().steps == ()
    world.service["spec"]["prefill"] = {"replicas": 1, "maxReplicas": 2}
    world.settle()
    assert world.service["status"]["epoch"] == 2
    assert world.service["status"]["recommendation"] == {"decode": {"nodes": 4}, "why": "p99"}


def test_memories_of_mixed_gpus_reach_every_process(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    """Blocks in the pool file are those of the status, cut for equal KV budgets."""
    spec["model"] = {"source": {"hostPath": {"path": "/m"}}, "shape": "llama-3.1-70b"}
    spec["decode"] = {"nodes": 2, "tensorParallel": 4, "allowMixedProducts": True}
    world = make_world(spec, hosts=2)
    for name, product, mib in (("h0", "NVIDIA-GB200", "189471"), ("h1", "NVIDIA-H100", "81559")):
        world.nodes[name]["metadata"]["labels"] = {
            "nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": mib,
        }  # fmt: skip
        world.nodes[name]["status"]["allocatable"] = {"nvidia.com/gpu": "4"}
    world.settle()
    shown = world.service["status"]["nodes"]
    text = world.objects["ConfigMap", "s-pool-1"]["data"]["pool.yaml"]
    pool = pool_from(yaml.safe_load(text))
    memories = [node.memory_bytes for node in pool.nodes]
    by_host = {"h0": 189_471 << 20, "h1": 81_559 << 20}
    assert memories == [int(by_host[node["host"]] * 0.9) for node in shown]
    layout = layout_of(world.parsed().spec, [m for m in memories if m is not None])
    assert layout is not None
    blocks = [layout.held[n][0] for n in range(2)]
    assert [f"{b.start}-{b.stop - 1}" for b in blocks] == [node["layers"] for node in shown]
    sizes = {node["host"]: b.stop - b.start for node, b in zip(shown, blocks, strict=True)}
    assert sizes["h0"] > sizes["h1"]  # the larger GPU roots more layers

    world.service["spec"]["decode"]["kvMemory"] = "1GiB"  # what users say wins
    world.settle()
    text = world.objects["ConfigMap", "s-pool-2"]["data"]["pool.yaml"]
    assert all(node.memory_bytes is None for node in pool_from(yaml.safe_load(text)).nodes)


def test_gpus_that_cannot_hold_the_model_are_refused_before_a_pod_starts(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    spec["model"] = {"source": {"hostPath": {"path": "/m"}}, "shape": "llama-3.1-405b"}
    spec["decode"] = {"nodes": 2, "tensorParallel": 1, "allowMixedProducts": True}
    world = make_world(spec, hosts=2)
    for name, mib in (("h0", "81559"), ("h1", "40960")):
        world.nodes[name]["metadata"]["labels"] = {"nvidia.com/gpu.memory": mib}
        world.nodes[name]["status"]["allocatable"] = {"nvidia.com/gpu": "1"}
    for _ in range(3):
        world.tick()
    assert "room on these GPUs: node 0 would hold" in world.condition("Placed")["message"]
    assert not world.pods()
