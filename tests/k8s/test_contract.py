"""The operator's verbs against an API server, the fake and a real one alike.

On a real cluster they run as the identity of KUBECONFIG, an administrator; nothing here needs
nodes, images or a controller of Kubernetes beyond garbage collection.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tknp_operator.api.service import Service, parse
from tknp_operator.build.names import metadata
from tknp_operator.build.network import coordinator_service, headless_service, pool_budgets
from tknp_operator.build.pods import coordinator_pod, decode_pod, prefill_pod
from tknp_operator.build.pool import pool_file_map
from tknp_operator.build.secrets import ca_secret, internal_secret
from tknp_operator.cluster.client import Api, Refusal, Unreachable, connect
from tknp_operator.cluster.execute import execute
from tknp_operator.cluster.kinds import KINDS, POD, SERVICE
from tknp_operator.cluster.mirror import Mirror
from tknp_operator.placement.place import PlacedNode, Placement, Slot
from tknp_operator.plan.steps import (
    Annotate,
    Apply,
    Create,
    Delete,
    Event,
    SetFinalizers,
    SetStatus,
    Step,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MAPS = KINDS["ConfigMap"]


@pytest.fixture
def api(cluster: Any) -> Api:
    return Api(connect(cluster.kubeconfig))


@pytest.fixture
def service(cluster: Any, namespace: str, service_object: Callable[..., dict[str, Any]]) -> Service:
    """A service on the cluster, whose CRD is there: by the fixture, or by the chart."""
    body = service_object("demo", namespace, paused=True)
    return parse(cluster.services.create(body=body, namespace=namespace).to_dict())


@pytest.fixture
def do(api: Api, service: Service) -> Callable[[Step], None]:
    return lambda step: execute(api, service, step, NOW)


def a_map(service: Service, name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "data": data,
            "metadata": metadata(service, name, "pool")}  # fmt: skip


def read(api: Api, service: Service, kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = api.request("GET", KINDS[kind].path(service.namespace, name))
    return found


def code(call: Callable[[], object]) -> int:
    """HTTP status of the refusal of `call`."""
    with pytest.raises(Refusal) as raised:
        call()
    return raised.value.code


def epoch_manifests(service: Service) -> list[dict[str, Any]]:
    slots = [Slot("a"), Slot("b")]
    placement = Placement(tuple(PlacedNode(n, slot, "") for n, slot in enumerate(slots)))
    return [
        internal_secret(service, ca_secret(service, NOW), NOW),
        pool_file_map(service, 1, placement),
        *(decode_pod(service, 1, n, slot) for n, slot in enumerate(slots)),
        prefill_pod(service, 1, 0), coordinator_pod(service, 1),
    ]  # fmt: skip


def test_every_manifest_of_an_epoch_is_taken(
    api: Api, service: Service, do: Callable[[Step], None]
) -> None:
    """And taken again: what exists is no error, what is applied alike changes nothing."""
    applied = [headless_service(service), coordinator_service(service, 1),
               *pool_budgets(service, 1, 2)]  # fmt: skip
    steps = [*map(Create, epoch_manifests(service)), *map(Apply, applied)]
    for step in steps:
        do(step)
    versions = [
        read(api, service, s.manifest["kind"], s.manifest["metadata"]["name"])["metadata"][
            "resourceVersion"]
        for s in steps if s.manifest["kind"] not in ("Pod", "PodDisruptionBudget")
    ]  # fmt: skip
    for step in steps:
        do(step)
    assert versions == [
        read(api, service, s.manifest["kind"], s.manifest["metadata"]["name"])["metadata"][
            "resourceVersion"]
        for s in steps if s.manifest["kind"] not in ("Pod", "PodDisruptionBudget")
    ]  # fmt: skip


def test_apply_takes_fields_back_and_leaves_those_of_others(
    api: Api, cluster: Any, service: Service, do: Callable[[Step], None]
) -> None:
    do(Apply(a_map(service, "m", ours="1")))
    cluster.core.patch_namespaced_config_map(
        "m", service.namespace, {"data": {"ours": "2", "theirs": "1"}}
    )
    do(Apply(a_map(service, "m", ours="1")))
    assert read(api, service, "ConfigMap", "m")["data"] == {"ours": "1", "theirs": "1"}


def test_what_others_own_is_not_taken_over(
    api: Api, cluster: Any, service: Service, do: Callable[[Step], None]
) -> None:
    core = cluster.core
    core.create_namespaced_config_map(service.namespace, {"metadata": {"name": "m"}})
    assert code(lambda: do(Apply(a_map(service, "m", ours="1")))) == 409
    assert "data" not in read(api, service, "ConfigMap", "m")


def test_deletion_means_that_very_object(
    api: Api, service: Service, do: Callable[[Step], None]
) -> None:
    do(Create(a_map(service, "m")))
    first = read(api, service, "ConfigMap", "m")["metadata"]["uid"]
    do(Delete("ConfigMap", "m", first))
    assert code(lambda: read(api, service, "ConfigMap", "m")) == 404
    do(Delete("ConfigMap", "m", first))  # gone already
    do(Create(a_map(service, "m")))
    do(Delete("ConfigMap", "m", first))  # another of that name
    assert read(api, service, "ConfigMap", "m")["metadata"]["uid"] != first


def test_status_annotations_and_finalizers_of_a_service(
    api: Api, service: Service, do: Callable[[Step], None]
) -> None:
    do(SetFinalizers(("tknp.io/drain",)))
    do(SetStatus({"epoch": 3}))
    do(Create(a_map(service, "m")))
    do(Annotate("ConfigMap", "m", "tknp.io/closed", "because"))
    found = read(api, service, SERVICE.name, "demo")
    assert found["status"]["epoch"] == 3
    assert found["metadata"]["finalizers"] == ["tknp.io/drain"]
    assert found["metadata"]["generation"] == service.generation
    annotations = read(api, service, "ConfigMap", "m")["metadata"]["annotations"]
    assert annotations["tknp.io/closed"] == "because"
    do(Annotate("ConfigMap", "no-such-map", "tknp.io/closed", "because"))
    api.delete(SERVICE, service.namespace, "demo", service.uid)
    assert "deletionTimestamp" in read(api, service, SERVICE.name, "demo")["metadata"]
    do(SetFinalizers(()))
    assert code(lambda: read(api, service, SERVICE.name, "demo")) == 404
    do(SetStatus({"epoch": 4}))  # too late is no error


def test_an_event_is_told_once(cluster: Any, service: Service, do: Callable[[Step], None]) -> None:
    for _ in range(2):
        do(Event("Normal", "Placed", "node 0 is on a"))
    selector = f"involvedObject.uid={service.uid}"
    listed = cluster.core.list_namespaced_event(service.namespace, field_selector=selector)
    assert [event.reason for event in listed.items] == ["Placed"]


def test_what_a_service_owns_ends_with_it(
    api: Api, service: Service, do: Callable[[Step], None], until: Any, collecting: None
) -> None:
    do(Apply(headless_service(service)))
    api.delete(SERVICE, service.namespace, "demo", service.uid)

    def gone() -> bool:
        try:
            read(api, service, "Service", "demo-pool")
        except Refusal as refusal:
            return refusal.code == 404
        return False

    until(gone, lambda: "the headless Service is still there")


def test_a_wrong_spec_is_refused_where_it_is_sent(
    cluster: Any, namespace: str, service_object: Callable[..., dict[str, Any]]
) -> None:
    """By the schema of the CRD, and by its rules in CEL."""
    api = Api(connect(cluster.kubeconfig))

    def create(change: Callable[[Any], object]) -> int:
        body = service_object("wrong", namespace, change=change)
        return code(lambda: api.request("POST", SERVICE.path(namespace), body=body))

    assert create(lambda spec: spec["decode"].update(nodes=0)) == 422
    assert create(lambda spec: spec["decode"].update(device="tpu")) == 422
    assert create(lambda spec: spec.pop("image")) == 422
    assert create(lambda spec: spec["decode"].update(nodes=3, copies=2)) == 422
    assert create(lambda spec: spec["model"].update(source={})) == 422
    assert create(lambda spec: spec.update(topology={"computeDomain": True})) == 422


class Seen:
    """What a mirror has told of, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.changed = threading.Condition()

    def __call__(self, obj: dict[str, Any]) -> None:
        with self.changed:
            self.names.append(obj["metadata"]["name"])
            self.changed.notify_all()

    def wait(self, done: Callable[[], bool]) -> None:
        ends_s = time.monotonic() + 60
        with self.changed:
            while not done():
                left_s = ends_s - time.monotonic()
                assert left_s > 0, self.names
                self.changed.wait(left_s)


def test_a_mirror_follows_the_cluster(
    api: Api, service: Service, do: Callable[[Step], None]
) -> None:
    label = f"t{uuid.uuid4().hex[:8]}"
    labelled = a_map(service, "m", k="1")
    labelled["metadata"]["labels"][label] = "yes"
    do(Create(labelled))
    do(Create(a_map(service, "other")))
    seen = Seen()
    mirror = Mirror(api, MAPS, service.namespace, label, seen)
    mirror.start()
    assert mirror.synced.wait(60)
    assert [m["metadata"]["name"] for m in mirror.snapshot()] == ["m"]
    found = mirror.get(service.namespace, "m")
    assert found is not None
    assert found["kind"] == "ConfigMap"
    api.merge(MAPS, service.namespace, "m", {"data": {"k": "2"}})

    def data() -> Any:
        now = mirror.get(service.namespace, "m")
        return now and now["data"]["k"]

    seen.wait(lambda: data() == "2")
    api.delete(MAPS, service.namespace, "m", found["metadata"]["uid"])
    seen.wait(lambda: not mirror.snapshot())


def test_a_mirror_lists_again_when_the_past_is_gone(fake_cluster: Any) -> None:
    """What a real server forgets, and when, can't be chosen from outside."""
    api, core = Api(connect(fake_cluster.kubeconfig)), fake_cluster.core
    seen = Seen()
    mirror = Mirror(api, MAPS, "default", "past=yes", seen)
    mirror.start()
    assert mirror.synced.wait(60)
    store = fake_cluster.fake.api.store
    with store.lock:  # the watch can't come in between
        core_map = {"apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": {"name": "m", "namespace": "default", "labels": {"past": "yes"},
                                 "uid": "u"}}  # fmt: skip
        store.put(("", "configmaps"), core_map)
        store.compact()
    seen.wait(lambda: "m" in seen.names)
    assert mirror.get("default", "m") is not None
    core.delete_namespaced_config_map("m", "default")


def test_long_lists_come_in_parts(api: Api, service: Service, do: Callable[[Step], None]) -> None:
    for i in range(3):
        do(Create(a_map(service, f"m-{i}")))
    items, version = api.list(MAPS, service.namespace, "")
    assert {"m-0", "m-1", "m-2"} <= {item["metadata"]["name"] for item in items}
    assert version


def test_optional_groups_are_found_or_not(api: Api) -> None:
    assert "tokenparallelservices" in api.served("/apis/tknp.io/v1alpha1")
    assert api.served("/apis/tknp.io/v1") == ()  # of the group, but another version
    assert api.served("/apis/no-such.example/v1") == ()


def test_refusals_say_what_and_nobody_is_unreachable(
    api: Api, service: Service, tmp_path: Path
) -> None:
    with pytest.raises(Refusal, match=r"pods .*not found") as raised:
        api.request("GET", POD.path(service.namespace, "nobody"))
    assert raised.value.code == 404
    nowhere = tmp_path / "config"
    nowhere.write_text(
        '{"apiVersion": "v1", "kind": "Config", "current-context": "x",'
        '"clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}],'
        '"users": [{"name": "x", "user": {"token": "x"}}],'
        '"contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}]}'
    )
    with pytest.raises(Unreachable):
        Api(connect(nowhere)).request("GET", "/version")
