"""Identity, versions and limits of objects, as the fake API server and a real one keep them."""

from __future__ import annotations

from functools import partial
from typing import Any

from kubernetes import client


def test_an_object_gets_an_identity_and_versions(
    things: Any, namespace: str, status_of: Any
) -> None:
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


def test_created_is_201_and_deleted_200(
    cluster: Any, namespace: str, status_of: Any, a_map: Any
) -> None:
    _, code, _ = cluster.core.create_namespaced_config_map_with_http_info(
        namespace, a_map("a", k="v"))  # fmt: skip
    assert code == 201
    _, code, _ = cluster.core.delete_namespaced_config_map_with_http_info("a", namespace)
    assert code == 200
    assert status_of(lambda: cluster.core.read_namespaced_config_map("a", namespace)) == (
        404, "NotFound")  # fmt: skip


def test_a_stale_put_is_refused(maps: Any, namespace: str, status_of: Any, a_map: Any) -> None:
    first = maps.create(body=a_map("a", k="1"), namespace=namespace).to_dict()
    newer = {**first, "data": {"k": "2"}}
    maps.replace(body=newer, namespace=namespace)
    assert status_of(lambda: maps.replace(body=newer, namespace=namespace)) == (409, "Conflict")
    del newer["metadata"]["resourceVersion"]
    assert maps.replace(body=newer, namespace=namespace).data.k == "2"


def test_what_is_immutable_stays(maps: Any, namespace: str, status_of: Any, a_map: Any) -> None:
    maps.create(body={**a_map("a", k="1"), "immutable": True}, namespace=namespace)
    change = {"data": {"k": "2"}}
    assert status_of(lambda: maps.patch(
        body=change, name="a", namespace=namespace, content_type="application/merge-patch+json",
    )) == (422, "Invalid")  # fmt: skip


def test_names_and_labels_are_checked(
    cluster: Any, namespace: str, status_of: Any, a_map: Any
) -> None:
    create = cluster.core.create_namespaced_config_map
    for metadata in ({"name": "Upper"}, {"name": "a_b"}, {"name": "a", "labels": {"k": "a b"}},
                     {"name": "a", "labels": {"k": "x" * 64}}):  # fmt: skip
        refused = partial(create, namespace, {"metadata": metadata})
        assert status_of(refused) == (422, "Invalid")
    assert status_of(lambda: create("no-such-namespace", a_map("a")))[0] == 404
    made = create(namespace, {"metadata": {"generateName": "a-"}})
    assert made.metadata.name.startswith("a-")
    assert len(made.metadata.name) > 2


def test_leases_and_events(cluster: Any, namespace: str, status_of: Any) -> None:
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
