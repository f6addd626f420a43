"""What a list selects and what a watch tells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kubernetes import watch
from kubernetes.client import ApiException


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


def test_field_selectors(
    cluster: Any, pods: Any, namespace: str, status_of: Any, pod_spec: dict[str, Any]
) -> None:
    for name in ("p", "q"):
        pods.create(body={"metadata": {"name": name}, "spec": pod_spec}, namespace=namespace)
    core = cluster.core
    listed = core.list_namespaced_pod(namespace, field_selector="metadata.name=p")
    assert [p.metadata.name for p in listed.items] == ["p"]
    assert len(core.list_namespaced_pod(namespace, field_selector="spec.nodeName=").items) == 2
    assert not core.list_namespaced_pod(namespace, field_selector="status.phase!=Pending").items
    assert status_of(lambda: core.list_namespaced_pod(namespace, field_selector="spec.x=1")) == (
        400, "BadRequest")  # fmt: skip


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


def test_a_watch_ends_in_time_and_with_a_bookmark(cluster: Any, namespace: str, a_map: Any) -> None:
    cluster.core.create_namespaced_config_map(namespace, a_map("a"))
    response = cluster.core.list_namespaced_config_map(
        namespace, watch=True, timeout_seconds=2, resource_version="0",
        allow_watch_bookmarks=True, _preload_content=False,
    )  # fmt: skip
    events = [json.loads(line) for line in response.data.decode().splitlines()]
    assert any(e["type"] == "ADDED" and e["object"]["metadata"]["name"] == "a" for e in events)
    assert {e["type"] for e in events} <= {"ADDED", "BOOKMARK"}


def test_the_past_ends_with_410(fake_cluster: Any, a_map: Any) -> None:
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
