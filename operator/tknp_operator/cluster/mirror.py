"""A list of one kind that follows the cluster.

    list -> watch from there, with bookmarks -> the stream ends -> watch on
                                             -> 410 Gone, or an error -> list again

A thread of its own; readers take snapshots. `synced` is set after the first list. Whoever reads may
see the past, never a mixture: the list is replaced and events are taken in order.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from tknp.errors import TknpError
from tknp_operator.cluster.client import Api, Refusal
from tknp_operator.cluster.kinds import Kind

log = logging.getLogger(__name__)
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_GONE = 410


class Mirror:
    """`changed(object)` is called, in this mirror's thread, for what came, changed or went."""

    def __init__(
        self, api: Api, kind: Kind, namespace: str | None, selector: str,
        changed: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self.kind = kind
        self.synced = threading.Event()
        self._api, self._namespace, self._selector = api, namespace, selector
        self._changed = changed
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=kind.plural, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def snapshot(self) -> list[dict[str, Any]]:
        """Objects as they were last seen; not to be changed."""
        with self._lock:
            return list(self._objects.values())

    def get(self, namespace: str, name: str) -> dict[str, Any] | None:
        with self._lock:
            return self._objects.get((namespace, name))

    def _run(self) -> None:
        version, failures = "", 0
        while True:
            version, failures, pause_s = self.turn(version, failures)
            threading.Event().wait(pause_s)

    def turn(self, version: str, failures: int) -> tuple[str, int, float]:
        """List, unless there is a `version` to watch from, and watch until the stream ends.

        The version to go on from (empty: list again), failures in a row, seconds to wait before.
        """
        try:
            return self._watch(version or self._list()), 0, 0.0
        except TknpError as error:
            if isinstance(error, Refusal) and error.code == _GONE:
                return "", failures, 0.0  # what was watched is no longer kept: nothing is wrong
            log.warning("%s can't be followed: %s", self.kind.plural, error)
            return "", failures + 1, min(_PAUSE_S * 2.0**failures, _LONGEST_PAUSE_S)

    def _list(self) -> str:
        items, version = self._api.list(self.kind, self._namespace, self._selector)
        fresh = {_key(item): {"kind": self.kind.name, **item} for item in items}
        with self._lock:
            gone = [obj for key, obj in self._objects.items() if key not in fresh]
            self._objects = fresh
        self.synced.set()
        for obj in (*gone, *fresh.values()):
            self._changed(obj)
        return version

    def _watch(self, version: str) -> str:
        for event in self._api.watch(self.kind, self._namespace, self._selector, version):
            obj = event["object"]
            if event["type"] == "ERROR":
                raise Refusal(int(obj.get("code", 500)), str(obj.get("message", "")))
            version = obj["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            obj = {"kind": self.kind.name, **obj}
            with self._lock:
                if event["type"] == "DELETED":
                    self._objects.pop(_key(obj), None)
                else:
                    self._objects[_key(obj)] = obj
            self._changed(obj)
        return version


def _key(obj: dict[str, Any]) -> tuple[str, str]:
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
