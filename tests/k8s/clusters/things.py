"""A kind of the tests' own: defaults, limits, rules, a keyed list, status and scale."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from typing import Any

from kubernetes import client
from kubernetes.client import ApiException

from .cluster import Cluster

_SERVED_S = 60.0


def definition() -> dict[str, Any]:
    """Its CustomResourceDefinition, in a group of its own."""
    group, plural = f"{uuid.uuid4().hex[:6]}.test.tknp.io", "things"
    conditions = {
        "type": "array", "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"],
        "items": {"type": "object", "required": ["type"],
                  "properties": {"type": {"type": "string"}, "status": {"type": "string"}}},
    }  # fmt: skip
    rule = {"rule": "!has(self.most) || self.size <= self.most", "message": "size is over most"}
    schema = {
        "type": "object", "properties": {
            "spec": {"type": "object", "required": ["size"], "properties": {
                "size": {"type": "integer", "minimum": 1},
                "most": {"type": "integer"},
                "colour": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                "replicas": {"type": "integer", "default": 1},
                "nested": {"type": "object", "default": {}, "properties": {
                    "deep": {"type": "boolean", "default": True}}},
                "tags": {"type": "object", "additionalProperties": {"type": "string"}},
            }, "x-kubernetes-validations": [rule]},
            "status": {"type": "object", "properties": {
                "replicas": {"type": "integer"}, "seen": {"type": "integer"},
                "conditions": conditions}},
        }}  # fmt: skip
    return {
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


@contextlib.contextmanager
def things(cluster: Cluster) -> Iterator[Any]:
    """The resource, served until left."""
    crd, crds = definition(), client.ApiextensionsV1Api(cluster.api)
    crds.create_custom_resource_definition(crd)
    try:
        yield _served(cluster, crd["spec"]["group"])
    finally:
        crds.delete_custom_resource_definition(crd["metadata"]["name"])


def _served(cluster: Cluster, group: str) -> Any:
    """Once it is discovered and can be listed: a server says so one by one."""
    ends_s = time.monotonic() + _SERVED_S
    while True:
        try:
            resource = cluster.resource(f"{group}/v1", "Thing")
            resource.get(namespace="default")
        except (ApiException, LookupError, ValueError) as error:
            cluster.resources.pop((f"{group}/v1", "Thing"), None)
            if time.monotonic() > ends_s:
                raise AssertionError(f"{group} is never served") from error
            time.sleep(0.1)
        else:
            return resource
