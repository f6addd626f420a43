"""Whatever happens, in whatever order: the pool comes to rest, and no two epochs ever mix."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tknp_operator.build.names import CLOSED, EPOCH, HASH

HAPPENINGS = ("pod", "node away", "node back", "node gone", "image", "replicas", "grow", "round",
              "reap", "start", "late")  # fmt: skip


def happen(world: Any, what: str, number: int) -> None:
    """One thing that clusters and people do; some of them do nothing at some times."""
    pods, nodes = sorted(world.pods()), sorted(world.nodes)
    match what:
        case "pod" if pods:
            del world.objects["Pod", pods[number % len(pods)]]
        case "node away" | "node back":
            condition = world.nodes[nodes[number % len(nodes)]]["status"]["conditions"][0]
            condition["status"] = "True" if what == "node back" else "Unknown"
            condition["lastTransitionTime"] = world.now.isoformat()
        case "node gone" if len(nodes) > 3:
            gone = nodes[number % len(nodes)]
            del world.nodes[gone]
        case "image":
            world.service["spec"]["image"] = f"tknp:{number}"
            world.service["metadata"]["generation"] += 1
        case "replicas":
            world.service["spec"]["prefill"]["replicas"] = 1 + number % 3
        case "grow":
            world.service["spec"]["decode"]["nodes"] = 2 + number % 2
        case "round":
            world.tick()
        case "reap":
            world.reap()
        case "start":
            world.start()
        case "late":
            world.later(20)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 9)), max_size=25))
def test_it_always_comes_to_rest_and_never_mixes(
    make_world: Callable[..., Any], spec: dict[str, Any], story: list[tuple[str, int]]
) -> None:
    spec = copy.deepcopy(spec)
    spec["prefill"] = {"replicas": 1, "maxReplicas": 3}
    world = make_world(spec, hosts=5)
    world.settle()
    for what, number in story:
        happen(world, what, number)
        unmixed(world)
        world.tick()
        unmixed(world)
    for node in world.nodes.values():
        node["status"]["conditions"][0]["status"] = "True"
    world.settle(30)
    assert world.plan().steps == ()
    assert world.condition("Ready")["status"] == "True"
    assert {p["metadata"]["labels"][EPOCH] for p in world.pods().values()} == {
        str(world.service["status"]["epoch"])
    }
    assert len(world.pods("decode")) == world.service["spec"]["decode"]["nodes"]


def unmixed(world: Any) -> None:
    """One hash in an epoch, one epoch behind the coordinator's name, one node on a slot."""
    assert len(world.behind_coordinator()) <= 1
    open_ones = [o for (kind, name), o in world.objects.items() if kind == "ConfigMap"
                 and EPOCH in o["metadata"]["labels"]
                 and CLOSED not in (o["metadata"].get("annotations") or {})]  # fmt: skip
    assert len(open_ones) <= 2  # one that serves, one that starts beside it
    slots = [(s[0], s[1]) for o in open_ones for s in json.loads(o["data"]["slots.json"])]
    assert len(slots) == len(set(slots))  # no GPU for two nodes
    hashes: dict[str, set[str]] = {}
    for pod in world.pods().values():
        meta = pod["metadata"]
        hashes.setdefault(meta["labels"][EPOCH], set()).add(meta["annotations"][HASH])
    assert all(len(found) == 1 for found in hashes.values()), hashes
