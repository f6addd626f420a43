"""Server-side apply with owners of fields, and the older patches."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes.client import ApiException


def test_apply_owns_fields_and_disputes_those_of_others(
    maps: Any, namespace: str, a_map: Any
) -> None:
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
    pods: Any, things: Any, namespace: str, status_of: Any, pod_spec: dict[str, Any]
) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": pod_spec}
    sent = {"name": "p", "namespace": namespace, "field_manager": "one"}
    made = pods.server_side_apply(body=pod, **sent).to_dict()
    assert made["spec"]["containers"][0]["ports"][0]["protocol"] == "TCP"
    again = pods.server_side_apply(body=pod, **sent).to_dict()
    assert again["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    other = {**pod, "spec": {"containers": [{**pod_spec["containers"][0], "env": [
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


def test_json_and_strategic_patches(
    maps: Any, pods: Any, namespace: str, status_of: Any, a_map: Any, pod_spec: dict[str, Any]
) -> None:
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
    pods.create(body={"metadata": {"name": "p"}, "spec": pod_spec}, namespace=namespace)
    image = {"spec": {"containers": [{"name": "main", "image": "other"}]}}
    changed = pods.patch(body=image, name="p", namespace=namespace,
                         content_type="application/strategic-merge-patch+json")  # fmt: skip
    assert changed.spec.containers[0].image == "other"
    assert changed.spec.containers[0].ports[0].containerPort == 50051
