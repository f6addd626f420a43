"""Sequences of steps, case by case; the cluster is a dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tknp.config import pool_from
from tknp_operator.build.pool import pool_settings
from tknp_operator.plan import describe, plan

CLOSE = "annotate ConfigMap/s-pool-1 closed"
BASIS = [
    "create Secret/s-ca", "create Secret/s-internal", "create Secret/s-api-keys",
    "apply Service/s-pool", "apply NetworkPolicy/s-pool",
    "apply PodDisruptionBudget/s-prefill",
]  # fmt: skip
FIRST = [
    "create ConfigMap/s-pool-1",
    "create Pod/s-decode-1-0", "create Pod/s-decode-1-1", "create Pod/s-prefill-1-0",
    "create Pod/s-coordinator-1", "apply Service/s-coordinator",
    "apply PodDisruptionBudget/s-decode", "apply PodDisruptionBudget/s-coordinator",
    "apply Service/s-gateway", "apply Deployment/s-gateway",
    "apply PodDisruptionBudget/s-gateway", "apply ConfigMap/s-pool",
]  # fmt: skip


def test_a_new_service(world: Any) -> None:
    assert world.tick() == ["finalizers tknp.io/drain"]
    assert world.tick() == BASIS
    assert world.tick() == FIRST
    assert world.condition("Placed")["status"] == "True"
    assert {e.reason for e in world.events} == {"Placed"}
    assert world.tick() == []
    assert world.condition("Ready")["message"].startswith("0 of 2 decode nodes are ready")
    world.start()
    assert world.tick() == []
    assert world.condition("Ready")["status"] == "True"
    assert world.condition("Progressing")["status"] == "False"
    assert world.plan().steps == ()


def test_the_pool_file_is_one_that_a_pool_takes(world: Any) -> None:
    pool = pool_from(pool_settings(world.parsed(), 3))
    assert pool.epoch == 3
    assert pool.nodes[1].addresses == ("decode-3-1.s-pool.ns.svc:50100",)


def test_a_lost_pod_ends_the_epoch_and_moves_nobody(world: Any) -> None:
    world.settle()
    hosts = [n["host"] for n in world.service["status"]["nodes"]]
    del world.objects["Pod", "s-decode-1-0"]
    assert world.tick() == [CLOSE, "delete Pod/s-coordinator-1"]
    assert world.condition("Progressing")["message"] == "the pod of node 0 is gone"
    assert world.tick() == []  # it drains
    world.reap()
    assert world.tick()[:7] == [
        "delete Pod/s-prefill-1-0 in 5 s", "delete Pod/s-decode-1-1 in 5 s",
        "create ConfigMap/s-pool-2", "create Pod/s-decode-2-0", "create Pod/s-decode-2-1",
        "create Pod/s-prefill-2-0", "create Pod/s-coordinator-2",
    ]  # fmt: skip
    world.settle()
    assert [n["host"] for n in world.service["status"]["nodes"]] == hosts
    assert world.service["status"]["epoch"] == 2
    assert ("ConfigMap", "s-pool-1") not in world.objects


def test_a_host_that_stays_away_is_replaced_by_a_spare(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    spec["decode"]["spareNodes"] = 1
    world = make_world(spec)
    world.settle()
    before = world.service["status"]
    assert before["spares"] == ["h2"]
    lost = before["nodes"][0]["host"]
    ready = world.nodes[lost]["status"]["conditions"][0]
    ready |= {"status": "Unknown", "lastTransitionTime": world.now.isoformat()}
    made = world.plan()
    assert world.tick() == []  # it may come back
    assert made.again_s == 30
    world.later(31)
    assert world.tick() == [CLOSE, "delete Pod/s-coordinator-1"]
    world.settle()
    after = world.service["status"]
    assert [n["host"] for n in after["nodes"]] == ["h2", before["nodes"][1]["host"]]


def test_cordon_and_taint_move_nothing_that_has_nowhere_to_go(world: Any) -> None:
    world.settle()
    for node in world.nodes.values():
        node["spec"] = {"unschedulable": True, "taints": [{"key": "x", "effect": "NoSchedule"}]}
    assert world.tick() == []  # there is no better place


def test_a_change_of_the_pool_drains_first_and_never_mixes(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    world = make_world({**spec, "drain": {"surge": False}})
    world.settle()
    world.service["spec"]["image"] = "tknp:2"
    world.service["metadata"]["generation"] = 2
    assert world.tick() == [CLOSE, "delete Pod/s-coordinator-1", "apply Deployment/s-gateway"]
    world.service["spec"]["image"] = "tknp:3"  # a second change while the first drains
    world.reap()
    world.tick()
    images = {p["spec"]["containers"][0]["image"] for n, p in world.pods().items() if "-2" in n}
    assert images == {"tknp:3"}
    assert world.behind_coordinator() == {"2"}
    world.settle()
    assert world.service["status"]["epoch"] == 2
    assert len(world.pods("decode")) == 2


def test_prefill_comes_and_goes_within_an_epoch(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    spec |= {"prefill": {"replicas": 1, "maxReplicas": 3}, "drain": {"surge": False}}
    world = make_world(spec)
    world.settle()
    world.service["spec"]["prefill"]["replicas"] = 3
    assert world.tick() == ["create Pod/s-prefill-1-1", "create Pod/s-prefill-1-2"]
    world.settle()
    world.service["spec"]["prefill"]["replicas"] = 1
    assert world.tick() == ["delete Pod/s-prefill-1-1", "delete Pod/s-prefill-1-2"]
    world.settle()
    assert world.service["status"]["epoch"] == 1
    world.service["spec"]["prefill"] = {"replicas": 1, "maxReplicas": 4}
    assert world.tick() == [CLOSE, "delete Pod/s-coordinator-1"]  # places are in the pool file


def test_nothing_is_taken_away_where_nothing_can_be_placed(world: Any) -> None:
    world.settle()
    pods = set(world.pods())
    world.service["spec"]["decode"]["device"] = "cuda"
    world.tick()
    assert set(world.pods()) == pods
    assert "2 slots of 1 GPUs: 0 found" in world.condition("Placed")["message"]
    assert world.condition("Placed")["status"] == "False"
    told = [e for e in world.events if e.reason == "NotPlaced"]
    assert len(told) == 1
    world.tick()
    assert [e for e in world.events if e.reason == "NotPlaced"] == told  # once


def test_what_no_pool_can_be_is_said_before_a_pod_starts(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    spec["decode"] |= {"nodes": 40}
    world = make_world(spec)
    for _ in range(3):
        world.tick()
    assert world.condition("Placed")["reason"] == "Invalid"
    assert "nodes=40" in world.condition("Placed")["message"]
    assert not world.pods()


@pytest.mark.parametrize("phase", ["Pending", "Running"])
def test_a_pod_that_is_not_ready_yet_is_left_alone(world: Any, phase: str) -> None:
    for _ in range(3):
        world.tick()
    for pod in world.pods().values():
        pod["status"] = {"phase": phase, "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "no room"}]}  # fmt: skip
    world.tick()
    assert world.tick() == []
    assert "s-decode-1-0: not scheduled: no room" in world.condition("Ready")["message"]


def test_deleting_drains_and_then_lets_go(world: Any) -> None:
    world.settle()
    world.service["metadata"]["deletionTimestamp"] = world.now.isoformat()
    assert world.tick() == ["delete Pod/s-coordinator-1"]
    assert world.tick() == []
    world.reap()
    assert world.tick() == ["finalizers none"]
    assert world.service is None


@pytest.mark.parametrize("how", ["deleted", "suspended"])
def test_a_coordinator_on_a_lost_host_is_ended_by_force(world: Any, how: str) -> None:
    world.settle()
    world.objects["Pod", "s-coordinator-1"]["spec"]["nodeName"] = "h3"
    if how == "deleted":
        world.service["metadata"]["deletionTimestamp"] = world.now.isoformat()
    else:
        world.service["spec"]["suspend"] = True
    assert world.tick() == ["delete Pod/s-coordinator-1"]
    ready = world.nodes["h3"]["status"]["conditions"][0]
    ready |= {"status": "Unknown", "lastTransitionTime": world.now.isoformat()}
    assert world.tick() == []  # it may come back, and ends as it should
    world.later(31)
    assert world.tick() == ["delete Pod/s-coordinator-1 in 0 s"]


def test_suspending_keeps_the_object_and_the_gateway(world: Any) -> None:
    world.settle()
    world.service["spec"]["suspend"] = True
    world.settle()
    assert not world.pods()
    assert ("Deployment", "s-gateway") in world.objects
    assert world.condition("Ready")["reason"] == "Suspended"
    world.service["spec"]["suspend"] = False
    world.settle()
    assert world.condition("Ready")["status"] == "True"


def test_another_service_of_the_same_name_is_not_ours(world: Any) -> None:
    world.settle()
    world.service["metadata"]["uid"] = "u-new"
    world.service["metadata"]["finalizers"] = []
    world.service.pop("status")
    world.tick()
    assert world.observed().pods() == []


def test_what_somebody_changes_is_changed_back(world: Any) -> None:
    world.settle()
    world.objects["Service", "s-coordinator"]["spec"]["selector"] = {"app": "other"}
    assert world.tick() == ["apply Service/s-coordinator"]
    del world.objects["Deployment", "s-gateway"]
    assert world.tick() == ["apply Deployment/s-gateway"]


def test_a_compute_domain_is_made_where_the_cluster_has_them(
    make_world: Callable[..., Any], spec: dict[str, Any]
) -> None:
    spec["decode"]["device"] = "cuda"
    spec["topology"] = {"computeDomain": True}
    world = make_world(spec)
    for _ in range(3):
        world.tick()
    assert "install NVIDIA's DRA driver" in world.condition("Placed")["message"]
    assert not world.pods()
    seen = replace(world.observed(), served=frozenset({"ComputeDomain"}))
    steps = [describe(step) for step in plan(world.parsed(), seen, world.now).steps]
    assert "apply ComputeDomain/s-imex" in steps


def test_a_coordinator_on_a_lost_machine_holds_nobody_up(world: Any) -> None:
    """Its pod stays Terminating for ever, since no kubelet ends it."""
    world.settle()
    world.objects["Pod", "s-coordinator-1"]["spec"]["nodeName"] = "h3"
    ready = world.nodes["h3"]["status"]["conditions"][0]
    ready |= {"status": "Unknown", "lastTransitionTime": world.now.isoformat()}
    world.later(31)
    done = world.tick()
    assert done[:2] == [CLOSE, "delete Pod/s-coordinator-1 in 0 s"]
    assert "create ConfigMap/s-pool-2" in done
    assert world.condition("Progressing")["message"].startswith("host h3 of pod s-coordinator-1")
    world.settle()
    assert world.service["status"]["epoch"] == 2
