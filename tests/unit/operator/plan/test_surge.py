"""A changed pool beside the one that serves: exact steps, and what happens in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tknp_operator.build.names import EPOCH

NEXT = [
    "create ConfigMap/s-pool-2", "create Pod/s-decode-2-0", "create Pod/s-decode-2-1",
    "create Pod/s-prefill-2-0", "create Pod/s-coordinator-2",
]  # fmt: skip
LEAD = [
    "apply Service/s-coordinator", "apply PodDisruptionBudget/s-decode",
    "apply PodDisruptionBudget/s-coordinator",
]  # fmt: skip
CLOSE = "annotate ConfigMap/s-pool-1 closed"


@pytest.fixture
def changed(make_world: Callable[..., Any], spec: dict[str, Any]) -> Any:
    """A pool that serves, whose image has been changed."""
    world = make_world(spec)
    world.settle()
    change(world, "tknp:2")
    return world


def change(world: Any, image: str) -> None:
    world.service["spec"]["image"] = image
    world.service["metadata"]["generation"] += 1


def ready(world: Any, *names: str) -> None:
    for name in names:
        world.objects["Pod", name]["status"] = {
            "conditions": [{"type": "Ready", "status": "True"}]
        }  # fmt: skip


def images(world: Any, epoch: int) -> set[str]:
    return {
        p["spec"]["containers"][0]["image"] for n, p in world.pods().items() if f"-{epoch}" in n
    }


def test_it_starts_beside_takes_over_when_ready_and_only_then_the_old_one_drains(
    changed: Any,
) -> None:
    world = changed
    assert world.tick() == [*NEXT, "apply Deployment/s-gateway"]
    assert world.behind_coordinator() == {"1"}
    assert world.tick() == []
    assert world.condition("Ready")["status"] == "True"  # nobody notices anything
    assert world.service["status"]["epoch"] == 1
    assert world.condition("Progressing")["message"] == "epoch 2 starts beside 1"
    ready(world, "s-decode-2-0", "s-decode-2-1", "s-prefill-2-0")
    assert world.tick() == []  # the coordinator's word counts
    ready(world, "s-coordinator-2")
    assert world.tick() == [
        *LEAD, CLOSE, "delete Pod/s-coordinator-1",
        "apply ConfigMap/s-pool",
    ]  # fmt: skip
    assert world.behind_coordinator() == {"2"}
    assert world.condition("Ready")["message"] == "epoch 2 serves"
    assert world.tick() == []  # the old coordinator drains: its pods keep their KV
    assert "s-decode-1-0" in world.pods()
    world.reap()
    assert set(world.tick()) == {
        f"delete Pod/s-{name} in 5 s" for name in ("prefill-1-0", "decode-1-0", "decode-1-1")
    }
    world.reap()
    assert world.tick() == ["delete ConfigMap/s-pool-1"]
    assert world.tick() == []
    assert images(world, 2) == {"tknp:2"}


def changed_on_gpus(make_world: Callable[..., Any], spec: dict[str, Any], hosts: int) -> Any:
    """As `changed`, where a host has GPUs for one node only."""
    spec["model"]["source"] = {"hostPath": {"path": "/m"}}
    spec["decode"] = {"nodes": 2, "tensorParallel": 4}
    world = make_world(spec, hosts=hosts)
    for node in world.nodes.values():
        node["status"]["allocatable"] = {"nvidia.com/gpu": "4"}
    world.settle()
    change(world, "tknp:2")
    return world


def hosts_of(world: Any, epoch: int) -> list[str]:
    slots = json.loads(world.objects["ConfigMap", f"s-pool-{epoch}"]["data"]["slots.json"])
    return [host for host, _ in slots]


def test_no_host_is_for_both(make_world: Callable[..., Any], spec: dict[str, Any]) -> None:
    world = changed_on_gpus(make_world, spec, hosts=4)
    world.tick()
    assert set(hosts_of(world, 1)) & set(hosts_of(world, 2)) == set()
    world.settle()
    assert world.service["status"]["epoch"] == 2


@pytest.mark.parametrize("old_too", [False, True], ids=["one host", "one of each"])
def test_a_host_that_is_lost_for_good_ends_the_surge(
    make_world: Callable[..., Any], spec: dict[str, Any], old_too: bool
) -> None:
    world = changed_on_gpus(make_world, spec, hosts=4)
    world.tick()
    for epoch in (1, 2)[not old_too :]:
        lost = world.nodes[hosts_of(world, epoch)[0]]
        lost["status"]["conditions"][0] |= {
            "status": "Unknown", "lastTransitionTime": world.now.isoformat()
        }  # fmt: skip
    world.objects["Pod", "s-decode-2-0"]["spec"]["nodeName"] = hosts_of(world, 2)[0]
    world.later(31)
    assert set(world.tick()) == {
        "annotate ConfigMap/s-pool-2 closed", "delete Pod/s-decode-2-0 in 0 s",
        *(f"delete Pod/s-{name} in 5 s" for name in ("decode-2-1", "prefill-2-0", "coordinator-2")),
    }  # fmt: skip
    assert world.behind_coordinator() == {"1"}
    assert world.condition("Ready")["status"] == "True"
    world.settle()
    assert world.service["status"]["epoch"] == 2
    assert images(world, 2) == {"tknp:2"}
    assert world.condition("Ready")["status"] == "True"


def test_without_room_it_drains_first(make_world: Callable[..., Any], spec: dict[str, Any]) -> None:
    world = changed_on_gpus(make_world, spec, hosts=3)
    assert world.tick() == [CLOSE, "delete Pod/s-coordinator-1", "apply Deployment/s-gateway"]


def test_nobody_may_evict_the_epoch_that_serves(changed: Any) -> None:
    changed.service["spec"]["decode"]["nodes"] = 1
    changed.tick()
    assert protected(changed) == {"decode": ("1", 2), "coordinator": ("1", 1)}
    ready(changed, "s-coordinator-2")
    changed.tick()
    assert protected(changed) == {"decode": ("2", 1), "coordinator": ("2", 1)}


def protected(world: Any) -> dict[str, tuple[str, int]]:
    """By role, the epoch whose pods a budget selects, and how many of them have to stay."""
    found = {}
    for role in ("decode", "coordinator"):
        budget = world.objects["PodDisruptionBudget", f"s-{role}"]["spec"]
        found[role] = budget["selector"]["matchLabels"][EPOCH], budget["minAvailable"]
    return found


def test_what_never_gets_ready_takes_nothing_away(changed: Any) -> None:
    changed.tick()
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    changed.objects["Pod", "s-decode-2-0"]["status"] = {
        "containerStatuses": [{"state": {"waiting": waiting}}]
    }
    changed.later(86_400)
    assert changed.tick() == []
    assert changed.condition("Ready")["status"] == "True"
    assert changed.condition("Progressing")["message"] == (
        "epoch 2 starts beside 1: s-decode-2-0: ImagePullBackOff: no such image"
    )


@pytest.mark.parametrize("image", ["tknp:3", "tknp:1"], ids=["overtaken", "taken back"])
def test_a_second_change_gives_the_first_up(changed: Any, image: str) -> None:
    changed.tick()
    change(changed, image)
    done = changed.tick()
    assert done[0] == "annotate ConfigMap/s-pool-2 closed"
    assert set(done[1:5]) == {
        f"delete Pod/s-{name} in 5 s"
        for name in ("decode-2-0", "decode-2-1", "prefill-2-0", "coordinator-2")
    }
    assert changed.behind_coordinator() == {"1"}
    assert changed.condition("Ready")["status"] == "True"
    changed.reap()
    assert changed.tick() == ["delete ConfigMap/s-pool-2"]
    changed.settle()
    assert changed.service["status"]["epoch"] == (2 if image == "tknp:3" else 1)
    assert images(changed, changed.service["status"]["epoch"]) == {image}


def test_a_pod_of_the_next_one_that_goes_costs_the_old_one_nothing(changed: Any) -> None:
    changed.tick()
    changed.tick()
    del changed.objects["Pod", "s-decode-2-1"]
    changed.tick()
    assert changed.behind_coordinator() == {"1"}
    changed.settle()
    assert changed.service["status"]["epoch"] == 2


def test_when_the_old_one_breaks_the_next_one_takes_over_early(changed: Any) -> None:
    changed.tick()
    del changed.objects["Pod", "s-decode-1-0"]
    assert changed.tick() == [
        *LEAD, CLOSE, "delete Pod/s-coordinator-1",
        "apply ConfigMap/s-pool",
    ]  # fmt: skip
    assert changed.condition("Progressing")["message"] == (
        "epoch 2 takes over: the pod of node 0 is gone"
    )
    changed.settle()
    assert changed.condition("Ready")["status"] == "True"


def test_prefill_that_finds_no_room_beside_takes_that_of_the_old_one(changed: Any) -> None:
    changed.tick()
    changed.objects["Pod", "s-prefill-2-0"]["status"] = {"conditions": [{
        "type": "PodScheduled", "status": "False", "message": "0/4 nodes",
        "lastTransitionTime": changed.now.isoformat()}]}  # fmt: skip
    assert changed.tick() == []
    changed.later(31)
    assert CLOSE in changed.tick()
    assert "finds no room beside" in changed.condition("Progressing")["message"]
    changed.settle()
    assert changed.service["status"]["epoch"] == 2


def test_suspended_in_between_it_goes_on_with_the_next_one(changed: Any) -> None:
    changed.tick()
    changed.service["spec"]["suspend"] = True
    changed.settle()
    assert not changed.pods()
    changed.service["spec"]["suspend"] = False
    changed.settle()
    assert changed.condition("Ready")["status"] == "True"
    assert changed.service["status"]["epoch"] == 2
