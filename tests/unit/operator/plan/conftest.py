"""A cluster in a dict: what steps change, and pods that become ready when told to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tknp_operator.api.service import Service, parse
from tknp_operator.build.names import EPOCH, POOL, ROLE
from tknp_operator.plan import Observed, Plan, describe, of_service, plan
from tknp_operator.plan.steps import (
    Annotate,
    Apply,
    Create,
    Delete,
    Event,
    Merge,
    SetFinalizers,
    SetStatus,
)

START = datetime(2026, 1, 1, tzinfo=UTC)


class World:
    """One service and what there is of it. `tick` is one round of the operator."""

    def __init__(self, spec: dict[str, Any], hosts: int = 4) -> None:
        self.now = START
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.nodes = {f"h{i}": node(f"h{i}") for i in range(hosts)}
        self.service: dict[str, Any] | None = {
            "apiVersion": "tknp.io/v1alpha1", "kind": "TokenParallelService",
            "metadata": {"name": "s", "namespace": "ns", "uid": "u-0", "generation": 1},
            "spec": copy.deepcopy(spec),
        }  # fmt: skip
        self.events: list[Event] = []
        self.uids = 0
        self.served: frozenset[str] = frozenset()
        self.theirs: list[dict[str, Any]] = []  # Secrets that users have made and named

    def parsed(self) -> Service:
        assert self.service is not None
        return parse(self.service)

    def observed(self) -> Observed:
        kinds: dict[str, list[Any]] = {}
        for (kind, _), obj in self.objects.items():
            kinds.setdefault(kind, []).append(copy.deepcopy(obj))
        found = of_service(self.parsed(), kinds)
        found["Secret"] = [*found.get("Secret", []), *copy.deepcopy(self.theirs)]
        nodes = [copy.deepcopy(n) for n in self.nodes.values()]
        return Observed(found, nodes, {}, self.served)

    def plan(self) -> Plan:
        return plan(self.parsed(), self.observed(), self.now)

    def tick(self) -> list[str]:
        """Plan and do; what was done but for status and events."""
        made = self.plan()
        for step in made.steps:
            self.do(step)
        return [describe(s) for s in made.steps if not isinstance(s, SetStatus | Event)]

    def do(self, step: Any) -> None:
        assert self.service is not None
        match step:
            case Apply(manifest):
                self._put(manifest, create=False)
            case Create(manifest):
                self._put(manifest, create=True)
            case Annotate(kind, name, key, value):
                meta = self.objects[kind, name]["metadata"]
                meta["annotations"] = {**meta.get("annotations", {}), key: value}
            case Merge(kind, name, patch):
                self.objects[kind, name]["data"] |= patch["data"]
            case Delete(kind, name, uid, _):
                obj = self.objects.get((kind, name))
                if obj is not None and obj["metadata"]["uid"] == uid:
                    if kind == "Pod":
                        obj["metadata"]["deletionTimestamp"] = self.now.isoformat()
                    else:
                        del self.objects[kind, name]
            case SetFinalizers(finalizers):
                self.service["metadata"]["finalizers"] = list(finalizers)
                if not finalizers and "deletionTimestamp" in self.service["metadata"]:
                    self.service = None
            case SetStatus(status):
                self.service["status"] = copy.deepcopy(status)
            case Event():
                self.events.append(step)

    def _put(self, manifest: dict[str, Any], create: bool) -> None:
        key = manifest["kind"], manifest["metadata"]["name"]
        if create and key in self.objects:
            return
        obj = copy.deepcopy(manifest)
        old = self.objects.get(key)
        if old is None:
            self.uids += 1
        obj["metadata"]["uid"] = old["metadata"]["uid"] if old else f"u-{self.uids}"
        self.objects[key] = obj

    def pods(self, role: str = "") -> dict[str, dict[str, Any]]:
        return {
            name: obj for (kind, name), obj in self.objects.items()
            if kind == "Pod" and role in ("", obj["metadata"]["labels"][ROLE])
        }  # fmt: skip

    def reap(self) -> None:
        """Kubelets have ended pods that were deleted."""
        for name, pod in self.pods().items():
            if "deletionTimestamp" in pod["metadata"]:
                del self.objects["Pod", name]

    def start(self) -> None:
        """Every pod that is to stay becomes ready."""
        for pod in self.pods().values():
            pod["status"] = {"phase": "Running",
                             "conditions": [{"type": "Ready", "status": "True"}]}  # fmt: skip

    def settle(self, rounds: int = 20) -> int:
        """Rounds until nothing changes any more; fails if that never comes."""
        for number in range(rounds):
            before = copy.deepcopy((self.objects, self.service))
            self.tick()
            self.reap()
            self.start()
            if (self.objects, self.service) == before:
                return number
        raise AssertionError(f"no rest after {rounds} rounds: {self.tick()}")

    def later(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def condition(self, kind: str) -> dict[str, Any]:
        assert self.service is not None
        return next(c for c in self.service["status"]["conditions"] if c["type"] == kind)

    def behind_coordinator(self) -> set[str]:
        """Epochs of the pods that the coordinator's Service reaches."""
        selector = self.objects["Service", "s-coordinator"]["spec"]["selector"]
        assert POOL in selector
        return {
            pod["metadata"]["labels"][EPOCH] for pod in self.pods().values()
            if all(pod["metadata"]["labels"].get(k) == v for k, v in selector.items())
        }  # fmt: skip


def node(name: str, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }


@pytest.fixture
def spec() -> dict[str, Any]:
    return {
        "image": "tknp:1",
        "model": {"source": {"builtin": "smollm2"}},
        "decode": {"nodes": 2, "device": "cpu"},
    }


@pytest.fixture
def make_world() -> Callable[..., World]:
    return World


@pytest.fixture
def world(spec: dict[str, Any]) -> World:
    return World(spec)
