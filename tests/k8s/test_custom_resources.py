"""Custom resources: defaults, pruning, limits, and the status and scale subresources."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest
from kubernetes import client


def test_custom_resources_are_defaulted_pruned_and_checked(
    things: Any, namespace: str, status_of: Any
) -> None:
    def thing(name: str, **spec: Any) -> dict[str, Any]:
        return {"apiVersion": f"{things.group}/v1", "kind": "Thing", "metadata": {"name": name},
                "spec": spec, "status": {"seen": 9}}  # fmt: skip

    made = things.create(body=thing("a", size=1, unknown=2, tags={"k": "v"}), namespace=namespace)
    spec = made.to_dict()["spec"]
    assert spec == {"size": 1, "colour": "red", "replicas": 1, "nested": {"deep": True},
                    "tags": {"k": "v"}}  # fmt: skip
    assert "status" not in made.to_dict()
    for wrong in ({}, {"size": 0}, {"size": 1, "colour": "green"}, {"size": "one"},
                  {"size": 1, "tags": {"k": 1}}, {"size": 2, "most": 1}):  # fmt: skip
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
    things: Any, cluster: Any, namespace: str, pod_spec: dict[str, Any]
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
        "template": {"metadata": {"labels": labels}, "spec": pod_spec}}})  # fmt: skip
    scale = apps.read_namespaced_deployment_scale("d", namespace)
    assert scale.spec.replicas == 0


def rule(text: str) -> dict[str, Any]:
    return {"x-kubernetes-validations": [{"rule": text, "message": "m"}]}


TAGS = {"type": "array", "items": {"type": "string"}}
WRONG: dict[str, dict[str, Any]] = {
    "no type": {"properties": {"a": {"description": "of anything"}}},
    "no items": {"properties": {"a": {"type": "array"}}},
    "a default of another type": {"properties": {"a": {"type": "integer", "default": "one"}}},
    "a default with unknown fields": {"properties": {
        "a": {"type": "object", "default": {"x": 1}, "properties": {"b": {"type": "string"}}}}},
    "a default that breaks a rule before its own defaults are there": {"properties": {"a": {
        "type": "object", "default": {}, "properties": {"b": {"type": "boolean", "default": True}},
        **rule("self.b")}}},
    "a key of a list that items may lack": {"properties": {"a": {
        "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["k"],
        "items": {"type": "object", "properties": {"k": {"type": "string"}}}}}},
    "a rule that is no expression": {"properties": {}, **rule("self.size >")},
    "a rule about a field that isn't there": {"properties": {}, **rule("self.none == 1")},
    "a rule without a bound on its cost": {"properties": {"tags": TAGS},
        **rule("self.tags.all(a, self.tags.all(b, self.tags.all(c, a + b != c)))")},
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_definitions_are_refused(
    cluster: Any, clusters: ModuleType, status_of: Any, wrong: str
) -> None:
    crd = clusters.definition()
    schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"] = {"type": "object", **WRONG[wrong]}
    crds = client.ApiextensionsV1Api(cluster.api)
    assert status_of(lambda: crds.create_custom_resource_definition(crd)) == (422, "Invalid")
