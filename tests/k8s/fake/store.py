"""Objects in memory, their versions, and what watchers are told.

One lock guards everything; a change is told to watchers in the order of its resourceVersion.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from .errors import Refused

Key = tuple[str, str]  # group, plural
Name = tuple[str, str]  # namespace ("" of cluster-wide ones), name
HISTORY = 2000


@dataclass(frozen=True)
class Change:
    """`old` None: added. `new` None: deleted, and `old` is as it was last."""

    version: int
    key: Key
    old: dict[str, Any] | None
    new: dict[str, Any] | None


class Store:
    """Objects by resource and name. Callers hold `lock` for a read and the write that follows."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.version = 1
        self._changed = threading.Condition(self.lock)
        self._objects: dict[Key, dict[Name, dict[str, Any]]] = {}
        self._changes: deque[Change] = deque()
        self._oldest = 0  # watches from here on can be served

    def get(self, key: Key, name: Name) -> dict[str, Any] | None:
        """A copy; None if there is none."""
        found = self._objects.get(key, {}).get(name)
        return deepcopy(found) if found is not None else None

    def all(self, key: Key, namespace: str = "") -> list[dict[str, Any]]:
        """Copies, by name; of every namespace for ""."""
        objects = sorted(self._objects.get(key, {}).items())
        return [deepcopy(o) for (space, _), o in objects if namespace in ("", space)]

    def everything(self) -> Iterator[tuple[Key, dict[str, Any]]]:
        """Every object with its resource, as stored: to be looked at, not to be changed."""
        for key in list(self._objects):
            for obj in list(self._objects[key].values()):
                yield key, obj

    def put(self, key: Key, obj: dict[str, Any]) -> dict[str, Any]:
        """Write `obj` with a new resourceVersion; returns it."""
        with self.lock:
            name = obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
            old = self._objects.setdefault(key, {}).get(name)
            self.version += 1
            obj["metadata"]["resourceVersion"] = str(self.version)
            self._objects[key][name] = deepcopy(obj)
            self._tell(Change(self.version, key, old, self._objects[key][name]))
            return obj

    def remove(self, key: Key, obj: dict[str, Any]) -> dict[str, Any]:
        """Take `obj` away; returns it as watchers see it last."""
        with self.lock:
            name = obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
            old = self._objects[key].pop(name)
            self.version += 1
            last = {**old, "metadata": {**old["metadata"], "resourceVersion": str(self.version)}}
            self._tell(Change(self.version, key, last, None))
            return last

    def compact(self) -> None:
        """Forget the past: watches from before now get 410 Gone, as after etcd's compaction."""
        with self.lock:
            self._changes.clear()
            self._oldest = self.version
            self._changed.notify_all()

    def since(self, version: int, key: Key, timeout_s: float) -> tuple[list[Change], int]:
        """Changes of `key` after `version`, and the version that they reach; waits for one.

        Raises Refused 410 if the past since `version` is forgotten.
        """
        with self.lock:
            if self.version <= version:
                self._changed.wait(timeout_s)
            if version < self._oldest:
                raise Refused(410, f"too old resource version: {version} ({self._oldest})")
            found = [c for c in self._changes if c.version > version and c.key == key]
            return found, max(self.version, version)

    def _tell(self, change: Change) -> None:
        self._changes.append(change)
        if len(self._changes) > HISTORY:
            self._oldest = self._changes.popleft().version
        self._changed.notify_all()
