"""A mirror turn by turn, against an API server that says what the test has written down."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tknp_operator.cluster.client import Refusal, Unreachable
from tknp_operator.cluster.kinds import POD, Kind
from tknp_operator.cluster.mirror import Mirror


class Server:
    """`lists`: (names, version) or an error, for each list; `streams`: events or errors of each."""

    def __init__(self, lists: list[Any], streams: list[list[Any]]) -> None:
        self.lists, self.streams = iter(lists), iter(streams)
        self.watched: list[str] = []
        self.listed = 0

    def list(self, kind: Kind, namespace: str | None, selector: str) -> tuple[list[Any], str]:
        self.listed += 1
        said = next(self.lists)
        if isinstance(said, Exception):
            raise said
        names, version = said
        return [pod(name, version) for name in names], version

    def watch(
        self, kind: Kind, namespace: str | None, selector: str, version: str
    ) -> Iterator[Any]:
        self.watched.append(version)
        for event in next(self.streams):
            if isinstance(event, Exception):
                raise event
            yield event


def pod(name: str, version: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "ns", "resourceVersion": version}}


def event(kind: str, name: str, version: str) -> dict[str, Any]:
    return {"type": kind, "object": pod(name, version)}


GONE = {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}


def follow(lists: list[Any], streams: list[list[Any]]) -> tuple[Mirror, Server, list[str]]:
    server, told = Server(lists, streams), []
    api: Any = server
    mirror = Mirror(api, POD, None, "", lambda obj: told.append(obj["metadata"]["name"]))
    return mirror, server, told


def names(mirror: Mirror) -> set[str]:
    return {obj["metadata"]["name"] for obj in mirror.snapshot()}


def test_a_stream_that_ends_is_taken_up_where_it_ended() -> None:
    mirror, server, told = follow(
        [(["a"], "5")],
        [[event("ADDED", "b", "6"), event("BOOKMARK", "", "9")], [event("DELETED", "a", "10")]],
    )
    assert not mirror.synced.is_set()
    assert mirror.turn("", 0) == ("9", 0, 0.0)
    assert mirror.synced.is_set()
    assert names(mirror) == {"a", "b"}
    assert mirror.turn("9", 0) == ("10", 0, 0.0)
    assert names(mirror) == {"b"}
    assert told == ["a", "b", "a"]
    assert (server.listed, server.watched) == (1, ["5", "9"])


@pytest.mark.parametrize(
    "gone", [GONE, Refusal(410, "Gone")], ids=["in the stream", "as an answer"]
)
def test_410_gone_lists_again_at_once_and_tells_what_went_meanwhile(gone: Any) -> None:
    mirror, server, told = follow([(["a", "b"], "5"), (["b", "c"], "20")], [[gone], []])
    assert mirror.turn("", 0) == ("", 0, 0.0)
    told.clear()
    assert mirror.turn("", 0) == ("20", 0, 0.0)
    assert names(mirror) == {"b", "c"}
    assert set(told) == {"a", "b", "c"}  # a, whose deletion nobody has seen, too
    assert server.watched == ["5", "20"]


def test_failures_in_a_row_wait_longer_and_longer_and_keep_what_was_seen() -> None:
    lost = Unreachable("no answer")
    mirror, _, told = follow([(["a"], "5"), *[lost] * 6, (["a"], "9")], [[lost], []])
    version, failures, pause_s = mirror.turn("", 0)
    pauses = [pause_s]
    for _ in range(6):
        version, failures, pause_s = mirror.turn(version, failures)
        pauses.append(pause_s)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert names(mirror) == {"a"}
    assert mirror.turn(version, failures) == ("9", 0, 0.0)
    assert told == ["a", "a"]


def test_a_refusal_of_another_kind_is_a_failure() -> None:
    mirror, _, _ = follow([Refusal(403, "pods is forbidden")], [])
    assert mirror.turn("", 0) == ("", 1, 1.0)
    assert not mirror.synced.is_set()
