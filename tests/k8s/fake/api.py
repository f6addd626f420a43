"""The verbs of every resource: create, read, replace, patch, apply, delete.

Each changes one object under the store's lock: read, check resourceVersion, change, fill in and
check, bump generation, note managers, write.
"""

from __future__ import annotations

import json
import uuid
from copy import deepcopy
from typing import Any

import yaml

from . import builtin, definitions, garbage, managed, rules, schema
from .errors import Refused, invalid, not_found
from .kinds import BUILTIN, Kind, check_change, check_metadata, custom, fill_in
from .patches import json_patch, merge_patch, strategic_patch
from .store import Store

Object = dict[str, Any]
_CRDS = ("apiextensions.k8s.io", "customresourcedefinitions")
_NAMESPACES = ("", "namespaces")
_SERVERS = ("uid", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds",
            "generation", "namespace", "name")  # fmt: skip


class Api:
    """What the server does, without HTTP. `kinds`: (group, version, plural) -> Kind."""

    def __init__(self) -> None:
        self.store = Store()
        self.kinds = {(k.group, k.version, k.plural): k for k in BUILTIN}
        for name in ("default", "kube-system"):
            namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
            self.create(self.kinds["", "v1", "namespaces"], "", namespace, "fake")

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        found = self.store.get(kind.key, (namespace, name))
        if found is None:
            raise not_found(resource_name(kind), name)
        return found

    def create(self, kind: Kind, namespace: str, obj: Object, manager: str) -> Object:
        """Raises Refused 409 if it exists, 422 if it is invalid, 404 without its namespace."""
        with self.store.lock:
            obj = self._received(kind, namespace, obj)
            metadata = obj["metadata"]
            if not metadata.get("name") and metadata.get("generateName"):
                metadata["name"] = metadata["generateName"] + uuid.uuid4().hex[:5]
            if not metadata.get("name"):
                raise Refused(422, "name or generateName is required")
            if metadata.get("resourceVersion"):
                raise Refused(400, "resourceVersion should not be set on objects to be created")
            if self.store.get(kind.key, (namespace, metadata["name"])) is not None:
                text = f'{resource_name(kind)} "{metadata["name"]}" already exists'
                raise Refused(409, text, "AlreadyExists")
            if kind.status:
                obj.pop("status", None)
            return self._born(kind, obj, manager)

    def replace(
        self, kind: Kind, namespace: str, name: str, obj: Object, manager: str, subresource: str
    ) -> Object:
        """PUT. Raises Refused 409 for another resourceVersion than the stored one."""
        with self.store.lock:
            old = self.get(kind, namespace, name)
            new = self._received(kind, namespace, obj)
            if new["metadata"].get("name") != name:
                raise Refused(400, "the name of the object does not match the name on the URL")
            return self.changed(kind, old, new, manager, subresource)

    def patch(
        self, kind: Kind, namespace: str, name: str, patch: Any, content: str, manager: str,
        subresource: str,
    ) -> Object:  # fmt: skip
        """The three older patches, by content type."""
        with self.store.lock:
            old = self.get(kind, namespace, name)
            if content == "application/json-patch+json":
                new = json_patch(old, patch)
            elif content == "application/merge-patch+json":
                new = merge_patch(old, patch)
            elif content == "application/strategic-merge-patch+json" and kind.schema is None:
                new = strategic_patch(old, patch)
            else:
                raise Refused(415, f"the body of the request was in an unknown format: {content}")
            if new["metadata"].get("managedFields") is None:
                new["metadata"]["managedFields"] = []
            if kind.schema is None and not subresource:
                builtin.check(new)
            return self.changed(kind, old, new, manager, subresource)

    def apply(
        self, kind: Kind, namespace: str, name: str, body: str, manager: str, force: bool,
        subresource: str,
    ) -> tuple[Object, bool]:  # fmt: skip
        """Server-side apply; also whether the object is new."""
        if not manager:
            raise Refused(422, "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        with self.store.lock:
            applied = self._received(kind, namespace, yaml.safe_load(body), partial=True)
            if applied["metadata"].get("managedFields"):
                raise Refused(400, "metadata.managedFields must be nil")
            if applied["metadata"].setdefault("name", name) != name:
                raise Refused(400, "the name of the object does not match the name on the URL")
            if kind.schema is None:
                _fill_keys(applied)
            if kind.status and not subresource:
                applied.pop("status", None)
            old = self.store.get(kind.key, (namespace, name))
            if old is None and subresource:
                raise not_found(resource_name(kind), name)
            live = old or {
                "apiVersion": kind.api_version, "kind": kind.kind, "metadata": {"name": name}
            }  # fmt: skip
            if subresource:
                applied = {k: v for k, v in applied.items() if k != "spec"}
            sent = applied["metadata"].pop("resourceVersion", None)
            if old is not None and sent and sent != old["metadata"]["resourceVersion"]:
                raise stale(kind, name)
            new = managed.apply(
                live, applied, kind.schema, manager=manager, force=force,
                now=garbage.timestamp(), subresource=subresource,
            )  # fmt: skip
            if old is None:
                if kind.namespaced:
                    new["metadata"]["namespace"] = namespace
                return self._born(kind, new, ""), True
            return self.changed(kind, old, new, "", subresource), False

    def delete(self, kind: Kind, namespace: str, name: str, options: Object) -> Object:
        """Raises Refused 409 where a precondition fails."""
        with self.store.lock:
            obj = self.get(kind, namespace, name)
            garbage.check_preconditions(obj, options)
            gone = garbage.delete(self.store, kind.key, obj, options)
            self._forget(kind, obj)
            return gone

    def _received(self, kind: Kind, namespace: str, obj: Any, partial: bool = False) -> Object:
        if not isinstance(obj, dict) or not isinstance(obj.get("metadata"), dict):
            raise Refused(400, "the body is not an object with metadata")
        obj = deepcopy(obj)
        obj.setdefault("apiVersion", kind.api_version)
        obj.setdefault("kind", kind.kind)
        if (obj["apiVersion"], obj["kind"]) != (kind.api_version, kind.kind):
            raise Refused(400, f"{obj['apiVersion']} {obj['kind']} is not a {kind.kind}")
        if kind.namespaced:
            if obj["metadata"].setdefault("namespace", namespace) != namespace:
                raise Refused(400, "the namespace of the object does not match that of the request")
        else:
            obj["metadata"].pop("namespace", None)
        if kind.schema is None:
            builtin.check(obj, partial)
            return obj
        obj = schema.prune(obj, kind.schema, top=True)
        return obj if partial else schema.default(obj, kind.schema)

    def _born(self, kind: Kind, obj: Object, manager: str) -> Object:
        metadata, namespace = obj["metadata"], obj["metadata"].get("namespace", "")
        if kind.namespaced:
            space = self.store.get(_NAMESPACES, ("", namespace))
            if space is None:
                raise not_found("namespaces", namespace)
            if "deletionTimestamp" in space["metadata"]:
                raise Refused(409, f"namespace {namespace} is being terminated")
        metadata |= {"uid": str(uuid.uuid4()), "creationTimestamp": garbage.timestamp()}
        if "spec" in obj:
            metadata["generation"] = 1
        self._complete(kind, obj)
        if manager:
            managed.update(None, obj, kind.schema, manager=manager, now=garbage.timestamp())
        made = self.store.put(kind.key, obj)
        self._learn(kind, made)
        garbage.collect(self.store)
        return made

    def changed(
        self, kind: Kind, old: Object, new: Object, manager: str, subresource: str
    ) -> Object:
        new = deepcopy(new)  # a patch shares with `old` what it doesn't touch
        metadata, name = new["metadata"], old["metadata"]["name"]
        sent = metadata.get("resourceVersion")
        if sent and sent != old["metadata"]["resourceVersion"]:
            raise stale(kind, name)
        if metadata.get("uid") not in (None, old["metadata"]["uid"]):
            raise Refused(409, f"Precondition failed: UID in precondition: {metadata['uid']}")
        if subresource == "status":
            status = {"status": new["status"]} if "status" in new else {}
            new = {**{k: v for k, v in old.items() if k != "status"}, **status, "metadata": {
                **old["metadata"], "managedFields": metadata.get("managedFields", [])}}  # fmt: skip
        elif kind.status:
            new.pop("status", None)
            new |= {"status": old["status"]} if "status" in old else {}
        metadata = new["metadata"]
        for part in _SERVERS:
            metadata.pop(part, None)
            metadata |= {part: old["metadata"][part]} if part in old["metadata"] else {}
        metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
        self._complete(kind, new)
        check_change(old, new, kind)
        if manager:
            managed.update(
                old, new, kind.schema, manager=manager, now=garbage.timestamp(),
                subresource=subresource,
            )  # fmt: skip
        outside = {k: v for k, v in old.items() if k not in ("metadata", "status")}
        differs = any(new.get(k) != v for k, v in outside.items()) or set(new) - set(old) - {
            "status"
        }
        if differs and "generation" in metadata:
            metadata["generation"] = old["metadata"]["generation"] + 1
        if _comparable(new) == _comparable(old):
            return old  # nothing has changed: no new version, nobody is told
        made = self.store.put(kind.key, new)
        self._learn(kind, made)
        return garbage.settle(self.store, kind.key, made)

    def _complete(self, kind: Kind, obj: Object) -> None:
        if kind.schema is not None:
            obj |= schema.default(schema.prune(obj, kind.schema, top=True), kind.schema)
            problems = schema.problems(obj, kind.schema)
            problems = problems or list(rules.violations(obj, kind.schema))
            if problems:
                raise invalid(kind.kind, obj["metadata"].get("name", ""), problems)
        else:
            fill_in(obj, kind)
        if kind.key == _CRDS:
            definitions.check(obj)
        check_metadata(obj, kind)

    def _learn(self, kind: Kind, obj: Object) -> None:
        """A CRD makes its resources known and is established at once."""
        if kind.key != _CRDS:
            return
        for one in custom(obj):
            self.kinds[one.group, one.version, one.plural] = one
        conditions = (obj.get("status") or {}).get("conditions")
        if not conditions:
            obj["status"] = {
                "acceptedNames": obj["spec"]["names"],
                "storedVersions": [v["name"] for v in obj["spec"]["versions"] if v["storage"]],
                "conditions": [
                    {"type": name, "status": "True", "reason": "InitialNamesAccepted",
                     "message": "", "lastTransitionTime": garbage.timestamp()}
                    for name in ("NamesAccepted", "Established")
                ],
            }  # fmt: skip
            self.store.put(kind.key, obj)

    def _forget(self, kind: Kind, obj: Object) -> None:
        if kind.key == _CRDS and self.store.get(kind.key, ("", obj["metadata"]["name"])) is None:
            for one in custom(obj):
                self.kinds.pop((one.group, one.version, one.plural), None)
                for item in self.store.all(one.key):
                    self.store.remove(one.key, item)


def resource_name(kind: Kind) -> str:
    return f"{kind.plural}.{kind.group}" if kind.group else kind.plural


def stale(kind: Kind, name: str) -> Refused:
    return Refused(
        409, f'Operation cannot be fulfilled on {resource_name(kind)} "{name}": the object has '
        "been modified; please apply your changes to the latest version and try again",
    )  # fmt: skip


def _comparable(obj: Object) -> str:
    """What makes two states differ: everything but when managers were noted."""
    entries = obj["metadata"].get("managedFields") or []
    managers = [{k: v for k, v in one.items() if k != "time"} for one in entries]
    return json.dumps({**obj, "metadata": {**obj["metadata"], "managedFields": managers}},
                      sort_keys=True)  # fmt: skip


def _fill_keys(applied: Any) -> None:
    """The protocol of a port is part of its identity and is TCP if unsaid."""
    if isinstance(applied, dict):
        for name, value in applied.items():
            if name == "ports" and isinstance(value, list):
                for port in value:
                    if isinstance(port, dict):
                        port.setdefault("protocol", "TCP")
            _fill_keys(value)
    elif isinstance(applied, list):
        for item in applied:
            _fill_keys(item)
