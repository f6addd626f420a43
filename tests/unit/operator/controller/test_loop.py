"""The loop's own part: when a service is due again, and what is said of rounds that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tknp_operator.build.names import FINALIZER
from tknp_operator.cluster.client import Refusal, Unreachable
from tknp_operator.cluster.kinds import Kind
from tknp_operator.controller.loop import Controller
from tknp_operator.controller.metrics import Metrics

SPEC = {"image": "i", "model": {"source": {"builtin": "smollm2"}},
        "decode": {"nodes": 2, "device": "cpu"}}  # fmt: skip
KEY = ("ns", "a")


def service(name: str, spec: dict[str, Any] = SPEC, **meta: Any) -> dict[str, Any]:
    """As the API server has it once its finalizer is set."""
    return {"metadata": {"name": name, "namespace": "ns", "uid": f"u-{name}", "generation": 1,
                         "resourceVersion": "1", "finalizers": [FINALIZER], **meta},
            "spec": spec}  # fmt: skip


class Server:
    """Lists `services`, watches in silence, and fails whatever makes something while `error`."""

    def __init__(self, *services: dict[str, Any]) -> None:
        self.services = list(services)
        self.error: Exception | None = None
        self.made: list[str] = []
        self.statuses: dict[str, Any] = {}

    def list(self, kind: Kind, namespace: str | None, selector: str) -> tuple[list[Any], str]:
        return (list(self.services) if kind.plural == "tokenparallelservices" else []), "1"

    def watch(self, *_: Any) -> Iterator[Any]:
        threading.Event().wait()  # nothing happens any more
        yield from ()

    def served(self, prefix: str) -> tuple[str, ...]:
        return ()

    def request(self, method: str, path: str, query: Any = None) -> Any:
        raise Refusal(404, path)

    def create(self, manifest: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.made.append(f"{manifest['kind']}/{manifest['metadata']['name']}")

    apply = create

    def merge(self, kind: Kind, namespace: str, name: str, patch: Any, sub: str = "") -> None:
        if sub == "status":
            self.statuses[name] = patch["status"]


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def started(server: Server, clock: Clock) -> Controller:
    """A controller that has seen the cluster; its rounds are the test's to call."""
    api: Any = server
    controller = Controller(api, None, Metrics(), clock)
    controller.start()
    for mirror in controller._mirrors.values():
        assert mirror.synced.wait(60)
    return controller


def until_due(controller: Controller, clock: Clock, key: tuple[str, str] = KEY) -> float:
    """Seconds until `key` is due again."""
    return controller._due[key] - clock.s


def conditions(server: Server, name: str = "a") -> dict[str, dict[str, Any]]:
    return {c["type"]: c for c in server.statuses[name]["conditions"]}


def test_a_round_that_fails_is_tried_again_later_and_later_and_says_why() -> None:
    server, clock = Server(service("a")), Clock()
    controller = started(server, clock)
    server.error = Unreachable("no answer")
    waits = []
    for _ in range(8):
        controller._due.clear()
        controller._round(KEY)
        waits.append(until_due(controller, clock))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    told = conditions(server)["Degraded"]
    assert (told["status"], told["reason"], told["message"]) == ("True", "Retrying", "no answer")
    server.error = None
    controller._due.clear()
    controller._round(KEY)
    assert "Secret/a-internal" in server.made
    server.error = Unreachable("again")
    controller._due.clear()
    controller._round(KEY)
    assert until_due(controller, clock) == 1  # a success in between starts anew


def test_one_that_fails_holds_no_other_up() -> None:
    server, clock = Server(service("a"), service("b")), Clock()
    controller = started(server, clock)
    controller._due.clear()
    server.error = Refusal(403, "secrets is forbidden")
    controller._round(KEY)
    controller._mark(("ns", "b"))
    assert controller._next() == ("ns", "b")
    assert controller._next() is None  # a is not due yet
    clock.s += 1
    assert controller._next() == KEY


def test_a_change_makes_due_at_once_what_waits_for_its_retry() -> None:
    server, clock = Server(service("a")), Clock()
    controller = started(server, clock)
    server.error = Unreachable("no answer")
    for _ in range(7):
        controller._due.clear()
        controller._round(KEY)
    assert until_due(controller, clock) == 60
    controller._changed({"kind": "TokenParallelService", "metadata": service("a")["metadata"]})
    assert until_due(controller, clock) == 0
    controller._mark(KEY, 30)  # what is due stays due
    assert until_due(controller, clock) == 0


def test_an_invalid_object_says_so_and_others_go_on() -> None:
    wrong = {**SPEC, "decode": {"nodes": 3, "copies": 2, "device": "cpu"}}
    server, clock = Server(service("a", wrong)), Clock()
    controller = started(server, clock)
    controller._round(KEY)
    told = conditions(server)["Ready"]
    assert (told["status"], told["reason"]) == ("False", "Invalid")
    assert "copies 2 pairs every root" in told["message"]


def test_what_nobody_foresaw_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server, clock = Server(service("a")), Clock()
    controller = started(server, clock)
    controller._due.clear()
    server.error = ZeroDivisionError("a defect")
    controller._round(KEY)
    assert until_due(controller, clock) == 60


def test_every_service_is_looked_at_once_a_minute() -> None:
    server, clock = Server(service("a", metadata="x", finalizers=[])), Clock()
    controller = started(server, clock)
    controller._due.clear()
    controller._round(KEY)  # only sets the finalizer
    assert 0 <= until_due(controller, clock) <= 60
    gone = ("ns", "gone")
    controller._round(gone)
    assert gone not in controller._due
