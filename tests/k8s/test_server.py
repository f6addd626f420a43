"""What this project takes for granted of an API server, of the fake and of a real one alike.

Read by the unmodified `kubernetes` client, and by kubectl. A test that holds on the fake and not on
a real cluster is a defect of the fake.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client import ApiException

NOTICED_S = 60.0
POD = {
    "containers": [
        {"name": "main", "image": "none", "ports": [{"name": "grpc", "containerPort": 50051}]}
    ]
}


def until(condition: Callable[[], Any], what: str) -> Any:
    """What `condition` gives once it gives something."""
    ends_s = time.monotonic() + NOTICED_S
    while time.monotonic() < ends_s:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"never: {what}")


def status_of(call: Callable[[], Any]) -> tuple[int, str]:
    """Code and reason of the refusal of `call`."""
    with pytest.raises(ApiException) as raised:
        call()
    return raised.value.status, json.loads(raised.value.body)["reason"]


def a_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


@pytest.fixture
def maps(cluster: Any) -> Any:
    return cluster.resource("v1", "ConfigMap")


@pytest.fixture
def pods(cluster: Any) -> Any:
    return cluster.resource("v1", "Pod")


@pytest.fixture(scope="module")
def things(cluster: Any) -> Iterator[Any]:
    """A kind of the test's own: defaults, limits, a keyed list, status and scale."""
    word = uuid.uuid4().hex[:6]
    group, plural = f"{word}.test.tknp.io", "things"
    conditions = {
        "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
        "items": {"type": "object", "required": ["type"],
                  "properties": {"type": {"type": "string"}, "status": {"type": "string"}}},
    }  # fmt: skip
    schema = {
        "type": "object", "properties": {
            "spec": {"type": "object", "required": ["size"], "properties": {
                "size": {"type": "integer", "minimum": 1},
                "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                "replicas": {"type": "integer", "default": 1},
                "nested": {"type": "object", "default": {}, "properties": {
                    "deep": {"type": "boolean", "default": True}}},
                "tags": {"type": "object", "additionalProperties": {"type": "string"}},
            }},
            "status": {"type": "object", "properties": {
                "replicas": {"type": "integer"}, "seen": {"type": "integer"},
                "conditions": conditions}},
        }}  # fmt: skip
    crd = {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": {"plural": plural, "singular": "thing", "kind": "Thing"},
            "versions": [{
                "name": "v1", "served": True, "storage": True,
                "schema": {"openAPIV3Schema": schema},
                "subresources": {"status": {}, "scale": {
                    "specReplicasPath": ".spec.replicas",
                    "statusReplicasPath": ".status.replicas"}},
            }],
        },
    }  # fmt: skip
    crds = client.ApiextensionsV1Api(cluster.api)
    crds.create_custom_resource_definition(crd)

    def served() -> Any:
        conditions = crds.read_custom_resource_definition(crd["metadata"]["name"]).status.conditions
        return any(c.type == "Established" and c.status == "True" for c in conditions or ())

    until(served, "the CRD is established")

    def found() -> Any:
        try:
            return cluster.resource(f"{group}/v1", "Thing")
        except Exception:
            return None

    yield until(found, "the CRD is discovered")
    crds.delete_custom_resource_definition(crd["metadata"]["name"])


def test_an_object_gets_an_identity_and_versions(things: Any, namespace: str) -> None:
    body = {"apiVersion": f"{things.group}/v1", "kind": "Thing", "metadata": {"name": "a"},
            "spec": {"size": 3, "unknown": 1}}  # fmt: skip
    made = things.create(body=body, namespace=namespace)
    assert made.metadata.uid
    assert made.metadata.generation == 1
    assert made.metadata.creationTimestamp
    assert status_of(lambda: things.create(body=body, namespace=namespace)) == (
        409, "AlreadyExists")  # fmt: skip
    patched = things.patch(body={"metadata": {"labels": {"x": "y"}}}, name="a",
                           namespace=namespace,
                           content_type="application/merge-patch+json")  # fmt: skip
    assert patched.metadata.generation == 1
    assert patched.metadata.resourceVersion != made.metadata.resourceVersion
    grown = things.patch(body={"spec": {"size": 4}}, name="a", namespace=namespace,
                         content_type="application/merge-patch+json")  # fmt: skip
    assert grown.metadata.generation == 2
    again = things.patch(body={"spec": {"size": 4}}, name="a", namespace=namespace,
                         content_type="application/merge-patch+json")  # fmt: skip
    assert again.metadata.resourceVersion == grown.metadata.resourceVersion


def test_created_is_201_and_deleted_200(cluster: Any, namespace: str) -> None:
    _, code, _ = cluster.core.create_namespaced_config_map_with_http_info(
        namespace, a_map("a", k="v"))  # fmt: skip
    assert code == 201
    _, code, _ = cluster.core.delete_namespaced_config_map_with_http_info("a", namespace)
    assert code == 200
    assert status_of(lambda: cluster.core.read_namespaced_config_map("a", namespace)) == (
        404, "NotFound")  # fmt: skip


def test_a_stale_put_is_refused(maps: Any, namespace: str) -> None:
    first = maps.create(body=a_map("a", k="1"), namespace=namespace).to_dict()
    newer = {**first, "data": {"k": "2"}}
    maps.replace(body=newer, namespace=namespace)
    assert status_of(lambda: maps.replace(body=newer, namespace=namespace)) == (409, "Conflict")
    del newer["metadata"]["resourceVersion"]
    assert maps.replace(body=newer, namespace=namespace).data.k == "2"


def test_what_is_immutable_stays(maps: Any, namespace: str) -> None:
    maps.create(body={**a_map("a", k="1"), "immutable": True}, namespace=namespace)
    change = {"data": {"k": "2"}}
    assert status_of(lambda: maps.patch(
        body=change, name="a", namespace=namespace, content_type="application/merge-patch+json",
    )) == (422, "Invalid")  # fmt: skip


def test_custom_resources_are_defaulted_pruned_and_checked(things: Any, namespace: str) -> None:
    def thing(name: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": f"{things.group}/v1", "kind": "Thing", "metadata": {"name": name},
                "spec": spec, "status": {"seen": 9}}  # fmt: skip

    made = things.create(body=thing("a", size=1, unknown=2, tags={"k": "v"}), namespace=namespace)
    spec = made.to_dict()["spec"]
    assert spec == {"size": 1, "colour": "red", "replicas": 1, "nested": {"deep": True},
                    "tags": {"k": "v"}}  # fmt: skip
    assert "status" not in made.to_dict()
    for wrong in ({}, {"size": 0}, {"size": 1, "colour": "green"}, {"size": "one"},
                  {"size": 1, "tags": {"k": 1}}):  # fmt: skip
        refused = partial(things.create, body=thing("b", **wrong), namespace=namespace)
        assert status_of(refused) == (422, "Invalid")


def test_status_is_apart(things: Any, namespace: str) -> None:
    body = {"apiVersion": f"{things.group}/v1", "kind": "Thing", "metadata": {"name": "a"},
            "spec": {"size": 1}}  # fmt: skip
    made = things.create(body=body, namespace=namespace).to_dict()
    told = things.status.patch(
        body={"spec": {"size": 5}, "status": {"seen": 1}}, name="a", namespace=namespace,
        content_type="application/merge-patch+json",
    ).to_dict()  # fmt: skip
    assert (told["spec"]["size"], told["status"]["seen"]) == (1, 1)
    assert told["metadata"]["generation"] == made["metadata"]["generation"]
    told["status"]["seen"] = 2
    told["spec"]["size"] = 6
    replaced = things.replace(body=told, namespace=namespace).to_dict()
    assert (replaced["spec"]["size"], replaced["status"]["seen"]) == (6, 1)


def test_scale_of_a_custom_resource_and_of_a_deployment(
    things: Any, cluster: Any, namespace: str
) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    body = {"apiVersion": f"{things.group}/v1", "kind": "Thing", "metadata": {"name": "a"},
            "spec": {"size": 1}}  # fmt: skip
    things.create(body=body, namespace=namespace)
    place = (things.group, "v1", namespace, "things", "a")
    assert custom.get_namespaced_custom_object_scale(*place)["spec"]["replicas"] == 1
    custom.patch_namespaced_custom_object_scale(*place, {"spec": {"replicas": 4}})
    assert things.get(name="a", namespace=namespace).spec.replicas == 4
    apps = client.AppsV1Api(cluster.api)
    labels = {"app": "x"}
    apps.create_namespaced_deployment(namespace, {"metadata": {"name": "d"}, "spec": {
        "replicas": 0, "selector": {"matchLabels": labels},
        "template": {"metadata": {"labels": labels}, "spec": POD}}})  # fmt: skip
    scale = apps.read_namespaced_deployment_scale("d", namespace)
    assert scale.spec.replicas == 0


def test_apply_owns_fields_and_disputes_those_of_others(maps: Any, namespace: str) -> None:
    def apply(manager: str, force: bool = False, **data: str) -> Any:
        return maps.server_side_apply(
            body=a_map("a", **data), name="a", namespace=namespace, field_manager=manager,
            force_conflicts=force,
        ).to_dict()  # fmt: skip

    apply("one", mine="1", common="1")
    shared = apply("two", other="2", common="1")
    assert {m["manager"] for m in shared["metadata"]["managedFields"]} == {"one", "two"}
    with pytest.raises(ApiException) as raised:
        apply("two", other="2", common="2")
    refusal = json.loads(raised.value.body)
    assert (refusal["code"], refusal["reason"]) == (409, "Conflict")
    (cause,) = refusal["details"]["causes"]
    assert cause["reason"] == "FieldManagerConflict"
    assert 'conflict with "one"' in cause["message"]
    forced = apply("two", True, other="2", common="2")
    assert forced["data"] == {"mine": "1", "common": "2", "other": "2"}
    # What a manager stops to apply goes, what another holds too stays.
    assert apply("two", other="2")["data"] == {"mine": "1", "other": "2"}
    same = apply("two", other="2")
    assert same["metadata"]["resourceVersion"] == apply("two", other="2")["metadata"][
        "resourceVersion"]  # fmt: skip


def test_apply_merges_keyed_lists_of_pods_and_conditions(
    pods: Any, things: Any, namespace: str
) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": POD}
    sent = {"name": "p", "namespace": namespace, "field_manager": "one"}
    made = pods.server_side_apply(body=pod, **sent).to_dict()
    assert made["spec"]["containers"][0]["ports"][0]["protocol"] == "TCP"
    again = pods.server_side_apply(body=pod, **sent).to_dict()
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    other = {**pod, "spec": {"containers": [{**POD["containers"][0], "env": [
        {"name": "A", "value": "1"}]}]}}  # fmt: skip
    assert status_of(lambda: pods.server_side_apply(body=other, **sent)) == (422, "Invalid")

    kind = {"apiVersion": f"{things.group}/v1", "kind": "Thing", "metadata": {"name": "a"}}
    things.create(body={**kind, "spec": {"size": 1}}, namespace=namespace)
    for manager, name in (("one", "Ready"), ("two", "Placed"), ("one", "Ready")):
        condition = {"type": name, "status": "True"}
        told = things.status.server_side_apply(
            body={**kind, "status": {"conditions": [condition]}}, name="a", namespace=namespace,
            field_manager=manager,
        ).to_dict()  # fmt: skip
    assert [c["type"] for c in told["status"]["conditions"]] == ["Ready", "Placed"]


def test_json_and_strategic_patches(maps: Any, pods: Any, namespace: str) -> None:
    maps.create(body=a_map("a", k="1"), namespace=namespace)
    operations = [{"op": "test", "path": "/data/k", "value": "1"},
                  {"op": "add", "path": "/metadata/labels", "value": {"a": "c"}},
                  {"op": "replace", "path": "/data/k", "value": "2"}]  # fmt: skip
    patched = maps.patch(body=operations, name="a", namespace=namespace,
                         content_type="application/json-patch+json").to_dict()  # fmt: skip
    assert (patched["data"]["k"], patched["metadata"]["labels"]) == ("2", {"a": "c"})
    assert status_of(lambda: maps.patch(
        body=operations, name="a", namespace=namespace,
        content_type="application/json-patch+json",
    ))[0] == 422  # fmt: skip
    pods.create(body={"metadata": {"name": "p"}, "spec": POD}, namespace=namespace)
    image = {"spec": {"containers": [{"name": "main", "image": "other"}]}}
    changed = pods.patch(body=image, name="p", namespace=namespace,
                         content_type="application/strategic-merge-patch+json")  # fmt: skip
    assert changed.spec.containers[0].image == "other"
    assert changed.spec.containers[0].ports[0].containerPort == 50051


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("app=x", "ab"), ("app!=x", "c"), ("app in (x,y),n=1", "a"), ("n notin (1)", "bc"),
        ("n", "ab"), ("!n", "c"), ("app==y", "c"),
    ],
)  # fmt: skip
def test_label_selectors(cluster: Any, namespace: str, selector: str, found: str) -> None:
    labels = {"a": {"app": "x", "n": "1"}, "b": {"app": "x", "n": "2"}, "c": {"app": "y"}}
    for name, have in labels.items():
        cluster.core.create_namespaced_config_map(
            namespace, {"metadata": {"name": name, "labels": have}})  # fmt: skip
    listed = cluster.core.list_namespaced_config_map(namespace, label_selector=selector)
    names = [m.metadata.name for m in listed.items if m.metadata.name in labels]
    # A namespace of a real cluster has a map of its own.
    assert "".join(sorted(names)) == found


def test_field_selectors(cluster: Any, pods: Any, namespace: str) -> None:
    for name in ("p", "q"):
        pods.create(body={"metadata": {"name": name}, "spec": POD}, namespace=namespace)
    core = cluster.core
    listed = core.list_namespaced_pod(namespace, field_selector="metadata.name=p")
    assert [p.metadata.name for p in listed.items] == ["p"]
    assert len(core.list_namespaced_pod(namespace, field_selector="spec.nodeName=").items) == 2
    assert not core.list_namespaced_pod(namespace, field_selector="status.phase!=Pending").items
    assert status_of(lambda: core.list_namespaced_pod(namespace, field_selector="spec.x=1")) == (
        400, "BadRequest")  # fmt: skip


def test_names_and_labels_are_checked(cluster: Any, namespace: str) -> None:
    create = cluster.core.create_namespaced_config_map
    for metadata in ({"name": "Upper"}, {"name": "a_b"}, {"name": "a", "labels": {"k": "a b"}},
                     {"name": "a", "labels": {"k": "x" * 64}}):  # fmt: skip
        refused = partial(create, namespace, {"metadata": metadata})
        assert status_of(refused) == (422, "Invalid")
    assert status_of(lambda: create("no-such-namespace", a_map("a")))[0] == 404
    made = create(namespace, {"metadata": {"generateName": "a-"}})
    assert made.metadata.name.startswith("a-")
    assert len(made.metadata.name) > 2


def test_a_watch_tells_what_happens_after_a_list(cluster: Any, namespace: str) -> None:
    core, labels = cluster.core, {"seen": "yes"}
    create, patch = core.create_namespaced_config_map, core.patch_namespaced_config_map
    listed = core.list_namespaced_config_map(namespace)
    create(namespace, {"metadata": {"name": "a", "labels": labels}})
    create(namespace, {"metadata": {"name": "hidden"}})
    patch("a", namespace, {"data": {"k": "v"}})
    patch("a", namespace, {"metadata": {"labels": {"seen": None}}})
    patch("a", namespace, {"metadata": {"labels": labels}})
    core.delete_namespaced_config_map("a", namespace)
    events = watch.Watch().stream(
        core.list_namespaced_config_map, namespace, label_selector="seen=yes",
        resource_version=listed.metadata.resource_version, timeout_seconds=2,
    )  # fmt: skip
    told = [(e["type"], e["object"].metadata.name) for e in events]
    assert told == [("ADDED", "a"), ("MODIFIED", "a"), ("DELETED", "a"), ("ADDED", "a"),
                    ("DELETED", "a")]  # fmt: skip


def test_a_watch_ends_in_time_and_with_a_bookmark(cluster: Any, namespace: str) -> None:
    cluster.core.create_namespaced_config_map(namespace, a_map("a"))
    response = cluster.core.list_namespaced_config_map(
        namespace, watch=True, timeout_seconds=2, resource_version="0",
        allow_watch_bookmarks=True, _preload_content=False,
    )  # fmt: skip
    events = [json.loads(line) for line in response.data.decode().splitlines()]
    assert any(e["type"] == "ADDED" and e["object"]["metadata"]["name"] == "a" for e in events)
    assert {e["type"] for e in events} <= {"ADDED", "BOOKMARK"}


def test_the_past_ends_with_410(fake_cluster: Any) -> None:
    """How long a real server remembers can't be chosen from outside."""
    core = fake_cluster.core
    version = core.list_namespaced_config_map("default").metadata.resource_version
    core.create_namespaced_config_map("default", a_map("past"))
    fake_cluster.fake.api.store.compact()
    with pytest.raises(ApiException) as raised:
        for _ in watch.Watch().stream(core.list_namespaced_config_map, "default",
                                      resource_version=version, timeout_seconds=5):  # fmt: skip
            pass
    assert raised.value.status == 410
    core.delete_namespaced_config_map("past", "default")


def owned(name: str, owner: Any, **metadata: Any) -> dict[str, Any]:
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": owner.metadata.name,
                 "uid": owner.metadata.uid}  # fmt: skip
    return {"metadata": {"name": name, "ownerReferences": [reference], **metadata}}


def gone(cluster: Any, namespace: str, name: str) -> Callable[[], bool]:
    def look() -> bool:
        try:
            cluster.core.read_namespaced_config_map(name, namespace)
        except ApiException as error:
            return error.status == 404
        return False

    return look


@pytest.mark.parametrize("policy", ["Background", "Foreground", "Orphan"])
def test_dependents_follow_their_owner(cluster: Any, namespace: str, policy: str) -> None:
    core = cluster.core
    owner = core.create_namespaced_config_map(namespace, a_map("owner"))
    core.create_namespaced_config_map(namespace, owned("child", owner))
    core.delete_namespaced_config_map("owner", namespace, propagation_policy=policy)
    until(gone(cluster, namespace, "owner"), "the owner goes")
    if policy == "Orphan":
        kept = core.read_namespaced_config_map("child", namespace)
        assert not kept.metadata.owner_references
    else:
        until(gone(cluster, namespace, "child"), "the child goes")


def test_an_owner_that_never_was_takes_its_child_along(cluster: Any, namespace: str) -> None:
    core = cluster.core
    owner = core.create_namespaced_config_map(namespace, a_map("owner"))
    core.delete_namespaced_config_map("owner", namespace)
    core.create_namespaced_config_map(namespace, owned("child", owner))
    until(gone(cluster, namespace, "child"), "the child goes")


def test_finalizers_hold_what_is_deleted(cluster: Any, namespace: str) -> None:
    core = cluster.core
    core.create_namespaced_config_map(
        namespace, {"metadata": {"name": "a", "finalizers": ["tknp.io/test"]}})  # fmt: skip
    core.delete_namespaced_config_map("a", namespace)
    held = core.read_namespaced_config_map("a", namespace)
    assert held.metadata.deletion_timestamp
    core.patch_namespaced_config_map("a", namespace, {"metadata": {"finalizers": None}})
    until(gone(cluster, namespace, "a"), "it goes")


def test_deletion_means_one_object(cluster: Any, namespace: str) -> None:
    core = cluster.core
    first = core.create_namespaced_config_map(namespace, a_map("a")).metadata.uid
    core.delete_namespaced_config_map("a", namespace)
    core.create_namespaced_config_map(namespace, a_map("a"))
    body = {"preconditions": {"uid": first}}
    assert status_of(lambda: core.delete_namespaced_config_map("a", namespace, body=body)) == (
        409, "Conflict")  # fmt: skip
    assert core.read_namespaced_config_map("a", namespace)


def test_a_pod_on_a_node_goes_when_its_kubelet_says_so(cluster: Any, namespace: str) -> None:
    core = cluster.core
    core.create_namespaced_pod(namespace, {"metadata": {"name": "p"}, "spec": {
        **POD, "nodeName": "no-such-node", "terminationGracePeriodSeconds": 60}})  # fmt: skip
    core.delete_namespaced_pod("p", namespace, grace_period_seconds=45)
    held = core.read_namespaced_pod("p", namespace)
    assert held.metadata.deletion_timestamp
    assert held.metadata.deletion_grace_period_seconds == 45
    core.delete_namespaced_pod("p", namespace, grace_period_seconds=0)
    assert status_of(lambda: core.read_namespaced_pod("p", namespace)) == (404, "NotFound")


def test_leases_and_events(cluster: Any, namespace: str) -> None:
    leases = client.CoordinationV1Api(cluster.api)
    now = "2026-01-01T00:00:00.000000Z"
    made = leases.create_namespaced_lease(namespace, {"metadata": {"name": "l"}, "spec": {
        "holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": now}})  # fmt: skip
    made.spec.holder_identity = "b"
    leases.replace_namespaced_lease("l", namespace, made)
    assert status_of(lambda: leases.replace_namespaced_lease("l", namespace, made)) == (
        409, "Conflict")  # fmt: skip
    about = {"kind": "ConfigMap", "name": "a", "namespace": namespace, "uid": "u"}
    cluster.core.create_namespaced_event(namespace, {
        "metadata": {"generateName": "e-"}, "involvedObject": about, "reason": "Tested",
        "message": "m", "type": "Normal"})  # fmt: skip
    listed = cluster.core.list_namespaced_event(namespace, field_selector="reason=Tested")
    assert len(listed.items) == 1


def kubectl(cluster: Any, *arguments: str, stdin: str = "") -> str:
    program = Path(sys.executable).parent / "kubectl"
    done = subprocess.run(
        [str(program), "--kubeconfig", str(cluster.kubeconfig), *arguments],
        input=stdin, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kubectl_speaks_with_it(cluster: Any, namespace: str) -> None:
    text = json.dumps(a_map("a", k="v"))
    flags = ("-n", namespace)
    applied = kubectl(cluster, *flags, "apply", "--server-side", "--validate=false", "-f", "-",
                      stdin=text)  # fmt: skip
    assert "configmap/a serverside-applied" in applied
    assert "a" in kubectl(cluster, *flags, "get", "cm")
    assert kubectl(cluster, *flags, "get", "cm", "a", "-o", "jsonpath={.data.k}") == "v"
    kubectl(cluster, *flags, "label", "cm", "a", "x=y")
    assert "configmap/a" in kubectl(cluster, *flags, "get", "cm", "-l", "x=y", "-o", "name")
    assert "deleted" in kubectl(cluster, *flags, "delete", "cm", "a")
