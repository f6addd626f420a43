"""Server-side apply: who owns which field. Pure.

A path is a tuple of the elements that FieldsV1 uses: `f:name` of a field, `k:{...}` of an item with
keys, `v:...` of an item of a set. A manager owns leaves; an atomic list or an empty map is a leaf.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from .errors import Refused
from .lists import below, identity, keys_of

Path = tuple[str, ...]
_UNOWNED = {"apiVersion", "kind"}
# The server's own; nobody applies them.
_SERVERS = {"name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp",
            "managedFields", "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink",
            "generateName"}  # fmt: skip


def leaves(obj: dict[str, Any], schema: dict[str, Any] | None) -> dict[Path, Any]:
    """Every leaf of `obj` with its value."""
    found: dict[Path, Any] = {}

    def walk(value: Any, name: str, schema: dict[str, Any] | None, path: Path) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                top = not path and key in _UNOWNED
                if top or (path == ("f:metadata",) and key in _SERVERS):
                    continue
                walk(item, key, below(schema, key), (*path, f"f:{key}"))
            return
        keys = keys_of(name, value, schema) if isinstance(value, list) else None
        if keys is None:
            found[path] = value
            return
        items = (schema or {}).get("items") if schema is not None else None
        for item in value:
            if keys:
                part = "k:" + json.dumps({key: item[key] for key in keys}, separators=(",", ":"))
                walk(item, "", items, (*path, part))
            else:
                found[(*path, "v:" + json.dumps(item))] = item

    walk(obj, "", schema, ())
    return found


def to_fields(paths: Iterable[Path]) -> dict[str, Any]:
    """Paths -> FieldsV1."""
    root: dict[str, Any] = {}
    for path in sorted(paths):
        node = root
        for element in path:
            node = node.setdefault(element, {})
    return root


def from_fields(fields: dict[str, Any]) -> set[Path]:
    """FieldsV1 -> paths of leaves."""
    found: set[Path] = set()

    def walk(node: dict[str, Any], path: Path) -> None:
        children = [element for element in node if element != "."]
        if not children and path:
            found.add(path)
        for element in children:
            walk(node[element], (*path, element))

    walk(fields, ())
    return found


def merge(live: Any, applied: Any, name: str, schema: dict[str, Any] | None) -> Any:
    """`live` with what `applied` says: maps and keyed lists go into one another."""
    if isinstance(live, dict) and isinstance(applied, dict):
        result = dict(live)
        for key, value in applied.items():
            result[key] = merge(live.get(key), value, key, below(schema, key))
        return result
    if isinstance(applied, list) and isinstance(live, list):
        keys = keys_of(name, [*live, *applied], schema)
        if keys is not None:
            items = (schema or {}).get("items") if schema is not None else None
            order = {identity(item, keys): item for item in live}
            for item in applied:
                known = order.get(identity(item, keys))
                order[identity(item, keys)] = merge(known, item, "", items)
            return list(order.values())
    return deepcopy(applied)


def remove(obj: Any, path: Path) -> None:
    """Take the leaf at `path` out of `obj`; absent is fine. Containers that it empties stay."""
    element = path[0]
    if element.startswith("f:") and isinstance(obj, dict):
        if len(path) == 1:
            obj.pop(element[2:], None)
        elif element[2:] in obj:
            remove_in(obj, element[2:], path[1:])


def remove_in(parent: dict[str, Any], name: str, path: Path) -> None:
    """`remove` in the value `name` of `parent`, which may be a list."""
    value = parent[name]
    if not isinstance(value, list):
        remove(value, path)
        return
    kind, text = path[0][:2], path[0][2:]
    wanted = json.loads(text) if kind in ("k:", "v:") else None
    if kind == "v:":
        parent[name] = [item for item in value if item != wanted]
    elif kind == "k:":
        for item in list(value):
            if all(item.get(key) == part for key, part in wanted.items()):
                if len(path) > 1:
                    remove(item, path[1:])
                if len(path) == 1 or set(item) <= set(wanted):
                    value.remove(item)


def entry(manager: str, operation: str, version: str, now: str, subresource: str,
          paths: Iterable[Path]) -> dict[str, Any]:  # fmt: skip
    """One element of managedFields."""
    made = {"manager": manager, "operation": operation, "apiVersion": version, "time": now,
            "fieldsType": "FieldsV1", "fieldsV1": to_fields(paths)}  # fmt: skip
    return {**made, "subresource": subresource} if subresource else made


def _same(one: dict[str, Any], manager: str, operation: str, subresource: str) -> bool:
    who = one["manager"], one["operation"], one.get("subresource", "")
    return bool(who == (manager, operation, subresource))


def apply(
    live: dict[str, Any], applied: dict[str, Any], schema: dict[str, Any] | None, *,
    manager: str, force: bool, now: str, subresource: str = "",
) -> dict[str, Any]:  # fmt: skip
    """`live` after `manager` applied `applied`; managedFields included.

    Raises Refused 409 naming the other managers of fields that differ, unless `force`.
    """
    mine, current = leaves(applied, schema), leaves(live, schema)
    entries = live["metadata"].get("managedFields") or []
    others = [e for e in entries if not _same(e, manager, "Apply", subresource)]
    old = [e for e in entries if _same(e, manager, "Apply", subresource)]
    causes, kept, held = [], [], set[Path]()
    for other in others:
        paths = from_fields(other["fieldsV1"])
        taken = {p for p in paths & mine.keys() if p in current and current[p] != mine[p]}
        causes += [
            {"reason": "FieldManagerConflict", "field": "." + ".".join(p),
             "message": f'conflict with "{other["manager"]}" using {other["apiVersion"]}'}
            for p in sorted(taken)
        ]  # fmt: skip
        held |= paths - taken
        if paths - taken:
            kept.append({**other, "fieldsV1": to_fields(paths - taken)})
    if causes and not force:
        word = "conflict" if len(causes) == 1 else "conflicts"
        text = f"Apply failed with {len(causes)} {word}: " + "; ".join(
            f"{c['message']}: {c['field']}" for c in causes
        )
        raise Refused(409, text, causes=causes)
    result = deepcopy(live)
    gone = set().union(*(from_fields(e["fieldsV1"]) for e in old)) - mine.keys() - held
    for path in gone:
        remove(result, path)
    result = merge(result, applied, "", schema)
    since = old[0]["time"] if old and from_fields(old[0]["fieldsV1"]) == set(mine) else now
    made = entry(manager, "Apply", applied["apiVersion"], since, subresource, mine)
    result["metadata"]["managedFields"] = [*kept, made]
    return dict(result)


def update(
    live: dict[str, Any] | None, new: dict[str, Any], schema: dict[str, Any] | None, *,
    manager: str, now: str, subresource: str = "",
) -> None:  # fmt: skip
    """Write into `new` who owns its fields after `manager` sent it whole or patched."""
    before, after = leaves(live, schema) if live else {}, leaves(new, schema)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    entries = (live or new)["metadata"].get("managedFields") or []
    if "managedFields" in new["metadata"] and new["metadata"]["managedFields"] == [{}]:
        entries = []  # how a client asks for a fresh start
    kept, mine = [], set(changed)
    for one in entries:
        paths = from_fields(one["fieldsV1"]) & after.keys()
        if _same(one, manager, "Update", subresource):
            mine |= paths
        elif paths - changed:
            kept.append({**one, "fieldsV1": to_fields(paths - changed)})
    if mine:
        version = str(new["apiVersion"])
        kept.append(entry(manager, "Update", version, now, subresource, mine))
    new["metadata"]["managedFields"] = kept
