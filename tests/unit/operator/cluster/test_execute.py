"""Steps against an API server that answers from a dict."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from tknp_operator.api.service import Service, parse
from tknp_operator.build.names import metadata
from tknp_operator.cluster.client import Refusal
from tknp_operator.cluster.execute import execute
from tknp_operator.cluster.kinds import Kind
from tknp_operator.plan.steps import Apply, Create, Delete, Event, Merge

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Server:
    """The verbs of `Api`, over `objects`; `sent` is what changed something."""

    def __init__(self, *objects: Mapping[str, Any]) -> None:
        self.objects = {(o["kind"], o["metadata"]["name"]): dict(o) for o in objects}
        self.sent: list[tuple[str, str]] = []

    def request(self, method: str, path: str) -> Any:
        name = path.rpartition("/")[2]
        for (_, found), obj in self.objects.items():
            if found == name:
                return obj
        raise Refusal(404, f"{method} {path}: not found")

    def list(self, kind: Kind, namespace: str, selector: str) -> tuple[list[Any], str]:
        key, _, value = selector.partition("=")
        found = [o for (k, _), o in self.objects.items() if k == kind.name]
        return [o for o in found if (o["metadata"].get("labels") or {}).get(key) == value], "1"

    def apply(self, manifest: Mapping[str, Any]) -> None:
        self.sent.append(("apply", manifest["metadata"]["name"]))

    def create(self, manifest: Mapping[str, Any]) -> None:
        key = manifest["kind"], manifest["metadata"]["name"]
        if key in self.objects:
            raise Refusal(409, "it exists")
        self.objects[key] = dict(manifest)
        self.sent.append(("create", key[1]))

    def merge(self, kind: Kind, namespace: str, name: str, patch: Any, sub: str = "") -> None:
        if (kind.name, name) not in self.objects:
            raise Refusal(404, "not found")
        self.objects[kind.name, name]["data"] |= patch["data"]

    def delete(self, kind: Kind, namespace: str, name: str, uid: str, grace_s: int | None) -> None:
        found = self.objects.get((kind.name, name))
        if found is None:
            raise Refusal(404, "not found")
        if found["metadata"]["uid"] != uid:
            raise Refusal(409, "the uid is another")
        del self.objects[kind.name, name]


@pytest.fixture
def service() -> Service:
    return parse({
        "metadata": {"name": "s", "namespace": "ns", "uid": "u-0"},
        "spec": {"image": "i", "model": {"source": {"builtin": "smollm2"}},
                 "decode": {"nodes": 2, "device": "cpu"}},
    })  # fmt: skip


def thing(service: Service, kind: str, name: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "metadata": metadata(service, name, "pool"), **more}


def do(server: Server, service: Service, step: Any) -> None:
    execute(server, service, step, NOW)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Service", "Deployment"])
def test_what_others_own_is_not_taken_over(service: Service, kind: str) -> None:
    wanted = thing(service, kind, "s-gateway")
    server = Server({"kind": kind, "metadata": {"name": "s-gateway"}})
    with pytest.raises(Refusal, match="s-gateway exists and is not owned by this service: delete"):
        do(server, service, Apply(wanted))
    with pytest.raises(Refusal, match="not owned"):
        do(server, service, Create(wanted))
    assert server.sent == []


def test_ours_is_applied_again(service: Service) -> None:
    wanted = thing(service, "Service", "s-gateway")
    for server in (Server(), Server(wanted)):
        do(server, service, Apply(wanted))
        assert server.sent == [("apply", "s-gateway")]


def test_what_was_made_already_is_no_error(service: Service) -> None:
    secret = thing(service, "Secret", "s-internal")
    server = Server(secret)
    do(server, service, Create(secret))
    assert server.sent == []


def test_an_epoch_of_another_plan_is_not_joined(service: Service) -> None:
    server = Server(thing(service, "ConfigMap", "s-pool-2", data={"pool.yaml": "old"}))
    do(server, service, Create(thing(service, "ConfigMap", "s-pool-2", data={"pool.yaml": "old"})))
    with pytest.raises(Refusal, match="of another plan"):
        do(server, service,
           Create(thing(service, "ConfigMap", "s-pool-2", data={"pool.yaml": "new"})))  # fmt: skip


def test_only_that_very_object_is_deleted(service: Service) -> None:
    server = Server({"kind": "Pod", "metadata": {"name": "p", "uid": "new"}})
    do(server, service, Delete("Pod", "p", "old"))
    assert ("Pod", "p") in server.objects
    do(server, service, Delete("Pod", "p", "new"))
    assert server.objects == {}
    do(server, service, Delete("Pod", "p", "new"))  # gone already


def test_a_merge_leaves_what_it_does_not_name(service: Service) -> None:
    server = Server(thing(service, "Secret", "s-internal", data={"token": "t", "tls.crt": "old"}))
    do(server, service, Merge("Secret", "s-internal", {"data": {"tls.crt": "new"}}))
    assert server.objects["Secret", "s-internal"]["data"] == {"token": "t", "tls.crt": "new"}
    do(server, service, Merge("Secret", "gone", {"data": {}}))  # nothing is left to do


def test_an_event_is_told_once(service: Service) -> None:
    server = Server()
    event = Event("Normal", "Placed", "node 0 on h0")
    do(server, service, event)
    do(server, service, event)
    do(server, service, Event("Normal", "Placed", "node 0 on h1"))
    assert len(server.sent) == 2
