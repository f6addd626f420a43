"""What a watcher hears: what is there, what changes afterwards, bookmarks, 410 for a lost past."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import Refused
from .kinds import Kind
from .store import Change, Store

BOOKMARK_S = 2.0
_DEFAULT_WATCH_S = 300.0
_LOOK_S = 0.5
Object = dict[str, Any]


@dataclass(frozen=True)
class Watch:
    """One request. `namespace` "": all. `wanted`: by the selectors of `query`."""

    store: Store
    kind: Kind
    namespace: str
    wanted: Callable[[Object], bool]
    query: Mapping[str, str]

    def batches(self, closing: threading.Event) -> Iterator[list[Object]]:
        """Batches of watch events: one at once, then one whenever there may be some.

        A past that is forgotten is an ERROR event, after which nothing comes.
        """
        store, kind, query = self.store, self.kind, self.query
        ends_s = time.monotonic() + float(query.get("timeoutSeconds") or _DEFAULT_WATCH_S)
        bookmarks = query.get("allowWatchBookmarks", "").lower() in ("1", "true")
        told_s = time.monotonic()
        if query.get("resourceVersion", "0") in ("", "0"):
            with store.lock:
                version = store.version
                there = [o for o in store.all(kind.key, self.namespace) if self.wanted(o)]
            yield [{"type": "ADDED", "object": obj} for obj in there]
        else:
            version = int(query["resourceVersion"])
            yield []
        while time.monotonic() < ends_s and not closing.is_set():
            try:
                changes, version = store.since(version, kind.key, _LOOK_S)
            except Refused as refusal:
                yield [{"type": "ERROR", "object": refusal.status}]
                return
            yield [event for change in changes if (event := self._event(change)) is not None]
            if bookmarks and time.monotonic() - told_s >= BOOKMARK_S:
                told_s = time.monotonic()
                yield [_bookmark(kind, version)]
        if bookmarks:
            yield [_bookmark(kind, version)]

    def _event(self, change: Change) -> Object | None:
        """What is heard of `change`: one that leaves a selector is deleted to this watcher."""

        def seen(obj: Object | None) -> bool:
            return (
                obj is not None
                and self.namespace in ("", obj["metadata"].get("namespace", ""))
                and self.wanted(obj)
            )

        before, after = seen(change.old), seen(change.new)
        if after:
            return {"type": "MODIFIED" if before else "ADDED", "object": change.new}
        if not before or change.old is None:
            return None
        metadata = {**change.old["metadata"], "resourceVersion": str(change.version)}
        return {"type": "DELETED", "object": {**change.old, "metadata": metadata}}


def _bookmark(kind: Kind, version: int) -> Object:
    return {"type": "BOOKMARK", "object": {
        "apiVersion": kind.api_version, "kind": kind.kind,
        "metadata": {"resourceVersion": str(version), "creationTimestamp": None}}}  # fmt: skip
