"""What ends with its owner, its namespace or its last finalizer."""

from __future__ import annotations

from copy import deepcopy
from datetime import UTC, datetime, timedelta
from typing import Any

from .errors import Refused
from .store import Key, Store

_FOREGROUND = "foregroundDeletion"
_PODS = ("", "pods")
_NAMESPACES = ("", "namespaces")


def timestamp(after_s: float = 0.0) -> str:
    """RFC 3339, whole seconds, `after_s` from now."""
    then = datetime.now(UTC) + timedelta(seconds=after_s)
    return then.strftime("%Y-%m-%dT%H:%M:%SZ")


def check_preconditions(obj: dict[str, Any], options: dict[str, Any]) -> None:
    """Raise Refused 409 where DeleteOptions mean another object than this."""
    for part, wanted in (options.get("preconditions") or {}).items():
        have = obj["metadata"].get(part)
        if wanted and wanted != have:
            raise Refused(409, f"Precondition failed: {part} in precondition: {wanted}, {part} in "
                               f"object meta: {have}")  # fmt: skip


def delete(store: Store, key: Key, obj: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Delete `obj`, at once or once what holds it is gone; returns it as it is then.

    A pod on a node goes when its kubelet deletes it with grace 0, or at once with grace 0. Anything
    goes only without finalizers.
    """
    metadata = obj["metadata"]
    grace_s = _grace(key, obj, options)
    policy = options.get("propagationPolicy", "Background")
    finalizers = list(metadata.get("finalizers") or ())
    if policy == "Foreground" and _FOREGROUND not in finalizers and _dependents(store, obj):
        finalizers.append(_FOREGROUND)
    if policy == "Orphan":
        for kind, child in deepcopy(_dependents(store, obj)):
            owners = child["metadata"]["ownerReferences"]
            child["metadata"]["ownerReferences"] = [
                o for o in owners if o["uid"] != metadata["uid"]
            ]
            store.put(kind, child)
    if not finalizers and not grace_s and key != _NAMESPACES:
        gone = store.remove(key, obj)
        collect(store)
        return gone
    known = metadata.get("deletionGracePeriodSeconds", grace_s)
    if "deletionTimestamp" not in metadata or grace_s < known:
        metadata["deletionTimestamp"] = timestamp(grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s
        if "generation" in metadata:
            metadata["generation"] += 1
        if finalizers:
            metadata["finalizers"] = finalizers
        if key == _NAMESPACES:
            obj["status"]["phase"] = "Terminating"
        store.put(key, obj)
    collect(store)
    return obj


def settle(store: Store, key: Key, obj: dict[str, Any]) -> dict[str, Any]:
    """Remove `obj` if it was being deleted and nothing holds it any more."""
    metadata = obj["metadata"]
    held = metadata.get("finalizers") or metadata.get("deletionGracePeriodSeconds")
    if "deletionTimestamp" in metadata and not held and key != _NAMESPACES:
        store.remove(key, obj)
    collect(store)
    return obj


def collect(store: Store) -> None:
    """Delete what has lost all its owners, what is in a namespace that ends; then such owners."""
    again = True
    while again:
        again = False
        objects = list(store.everything())
        uids = {obj["metadata"]["uid"] for _, obj in objects}
        waiting = {
            obj["metadata"]["uid"] for _, obj in objects
            if _FOREGROUND in (obj["metadata"].get("finalizers") or ())
            and "deletionTimestamp" in obj["metadata"]
        }  # fmt: skip
        ending = {
            obj["metadata"]["name"] for key, obj in objects
            if key == _NAMESPACES and "deletionTimestamp" in obj["metadata"]
        }  # fmt: skip
        for key, obj in objects:
            metadata = obj["metadata"]
            owners = metadata.get("ownerReferences") or ()
            orphan = bool(owners) and not any(
                owner["uid"] in uids and owner["uid"] not in waiting for owner in owners
            )
            lost = orphan or metadata.get("namespace") in ending
            if lost and "deletionTimestamp" not in metadata:
                delete(store, key, deepcopy(obj), {})
                again = True
            elif metadata["uid"] in waiting and not _dependents(store, obj):
                rest = deepcopy(obj)
                rest["metadata"]["finalizers"].remove(_FOREGROUND)
                settle(store, key, store.put(key, rest))
                again = True
            elif (
                key == _NAMESPACES and metadata["name"] in ending
                and not any(o["metadata"].get("namespace") == metadata["name"] for _, o in objects)
            ):  # fmt: skip
                store.remove(key, obj)
                again = True
            if again:
                break


def _dependents(store: Store, owner: dict[str, Any]) -> list[tuple[Key, dict[str, Any]]]:
    uid = owner["metadata"]["uid"]
    return [
        (key, obj) for key, obj in store.everything()
        if any(o["uid"] == uid for o in obj["metadata"].get("ownerReferences") or ())
    ]  # fmt: skip


def _grace(key: Key, obj: dict[str, Any], options: dict[str, Any]) -> int:
    if key != _PODS or not obj["spec"].get("nodeName"):
        return 0
    if (obj.get("status") or {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    given = options.get("gracePeriodSeconds")
    return int(obj["spec"].get("terminationGracePeriodSeconds", 30) if given is None else given)
