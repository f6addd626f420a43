"""A model from an object store: copied once, before any pod starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def stored(make_world: Callable[..., Any], spec: dict[str, Any]) -> Any:
    spec["model"]["source"] = {"objectStore": {"uri": "s3://b/m", "claimName": "weights"}}
    world = make_world(spec)
    world.tick()  # finalizer
    world.tick()  # what every epoch needs
    return world


def ended(world: Any, how: str) -> None:
    world.objects["Job", "s-hydrate"]["status"] = {"conditions": [{"type": how, "status": "True"}]}


def test_pods_wait_for_the_copy(stored: Any) -> None:
    assert stored.tick() == ["create Job/s-hydrate"]
    assert stored.condition("Progressing")["reason"] == "Hydrating"
    made = stored.plan()
    assert made.steps == ()
    assert made.again_s == 30
    assert not stored.pods()
    ended(stored, "Complete")
    assert stored.tick() == [
        "create ConfigMap/s-pool-1", "create Pod/s-decode-1-0", "create Pod/s-decode-1-1",
        "create Pod/s-prefill-1-0", "create Pod/s-coordinator-1", "apply Service/s-coordinator",
        "apply PodDisruptionBudget/s-decode", "apply PodDisruptionBudget/s-coordinator",
        "apply Service/s-gateway", "apply Deployment/s-gateway",
        "apply PodDisruptionBudget/s-gateway", "apply ConfigMap/s-pool",
    ]  # fmt: skip
    stored.settle()
    assert stored.condition("Ready")["status"] == "True"


def test_a_copy_that_failed_is_told_and_begun_again_once_its_job_is_deleted(stored: Any) -> None:
    stored.tick()
    ended(stored, "Failed")
    assert stored.tick() == []
    assert stored.condition("Ready")["message"] == (
        "Job s-hydrate failed: look at its log, mend it, delete the Job"
    )
    assert [e.reason for e in stored.events if e.kind == "Warning"].count("Hydrating") == 2
    del stored.objects["Job", "s-hydrate"]
    assert stored.tick() == ["create Job/s-hydrate"]


def test_a_pool_that_runs_goes_on_though_its_job_is_collected(stored: Any) -> None:
    stored.tick()
    ended(stored, "Complete")
    stored.settle()
    del stored.objects["Job", "s-hydrate"]  # by hand, or by a clean-up of finished Jobs
    pods = set(stored.pods())
    stored.tick()
    assert set(stored.pods()) == pods
