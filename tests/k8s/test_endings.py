"""How objects end: with their owner, held by finalizers, that very one, by their kubelet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.client import ApiException


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
def test_dependents_follow_their_owner(
    cluster: Any, namespace: str, policy: str, a_map: Any, until: Any, collecting: None
) -> None:
    core = cluster.core
    owner = core.create_namespaced_config_map(namespace, a_map("owner"))
    core.create_namespaced_config_map(namespace, owned("child", owner))
    core.delete_namespaced_config_map("owner", namespace, propagation_policy=policy)
    until(gone(cluster, namespace, "owner"), lambda: "the owner goes")
    if policy == "Orphan":
        kept = core.read_namespaced_config_map("child", namespace)
        assert not kept.metadata.owner_references
    else:
        until(gone(cluster, namespace, "child"), lambda: "the child goes")


def test_an_owner_that_never_was_takes_its_child_along(
    cluster: Any, namespace: str, a_map: Any, until: Any, collecting: None
) -> None:
    core = cluster.core
    owner = core.create_namespaced_config_map(namespace, a_map("owner"))
    core.delete_namespaced_config_map("owner", namespace)
    core.create_namespaced_config_map(namespace, owned("child", owner))
    until(gone(cluster, namespace, "child"), lambda: "the child goes")


def test_finalizers_hold_what_is_deleted(cluster: Any, namespace: str, until: Any) -> None:
    core = cluster.core
    core.create_namespaced_config_map(
        namespace, {"metadata": {"name": "a", "finalizers": ["tknp.io/test"]}})  # fmt: skip
    core.delete_namespaced_config_map("a", namespace)
    held = core.read_namespaced_config_map("a", namespace)
    assert held.metadata.deletion_timestamp
    core.patch_namespaced_config_map("a", namespace, {"metadata": {"finalizers": None}})
    until(gone(cluster, namespace, "a"), lambda: "it goes")


def test_deletion_means_one_object(
    cluster: Any, namespace: str, status_of: Any, a_map: Any
) -> None:
    core = cluster.core
    first = core.create_namespaced_config_map(namespace, a_map("a")).metadata.uid
    core.delete_namespaced_config_map("a", namespace)
    core.create_namespaced_config_map(namespace, a_map("a"))
    body = {"preconditions": {"uid": first}}
    assert status_of(lambda: core.delete_namespaced_config_map("a", namespace, body=body)) == (
        409, "Conflict")  # fmt: skip
    assert core.read_namespaced_config_map("a", namespace)


def test_a_pod_on_a_node_goes_when_its_kubelet_says_so(
    cluster: Any, namespace: str, status_of: Any, pod_spec: dict[str, Any]
) -> None:
    core = cluster.core
    core.create_namespaced_pod(namespace, {"metadata": {"name": "p"}, "spec": {
        **pod_spec, "nodeName": "no-such-node", "terminationGracePeriodSeconds": 60}})  # fmt: skip
    core.delete_namespaced_pod("p", namespace, grace_period_seconds=45)
    held = core.read_namespaced_pod("p", namespace)
    assert held.metadata.deletion_timestamp
    assert held.metadata.deletion_grace_period_seconds == 45
    core.delete_namespaced_pod("p", namespace, grace_period_seconds=0)
    assert status_of(lambda: core.read_namespaced_pod("p", namespace)) == (404, "NotFound")
