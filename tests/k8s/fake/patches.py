"""The three older kinds of patch. Pure: object in, object out."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from .errors import Refused
from .lists import identity, keys_of


def merge_patch(target: Any, patch: Any) -> Any:
    """RFC 7386: null deletes, lists are replaced."""
    if not isinstance(patch, dict):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merge_patch(result.get(key), value)
    return result


def strategic_patch(target: Any, patch: Any, name: str = "") -> Any:
    """As merge_patch, but keyed lists merge; `$patch: delete` takes an item out."""
    if isinstance(patch, list):
        known = target if isinstance(target, list) else []
        keys = keys_of(name, [*known, *patch], None)
        if keys is None:
            return deepcopy(patch)
        items = {identity(item, keys): item for item in known}
        for item in patch:
            if isinstance(item, dict) and item.get("$patch") == "delete":
                items.pop(identity(item, keys), None)
            else:
                items[identity(item, keys)] = strategic_patch(items.get(identity(item, keys)), item)
        return list(items.values())
    if not isinstance(patch, dict):
        return deepcopy(patch)
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        else:
            result[key] = strategic_patch(result.get(key), value, key)
    return result


def json_patch(target: dict[str, Any], operations: Any) -> dict[str, Any]:
    """RFC 6902. Raises Refused 422 where a path or a test fails."""
    if not isinstance(operations, list):
        raise Refused(400, "a JSON patch is a list of operations")
    result = deepcopy(target)
    for operation in operations:
        try:
            kind, path = operation["op"], _parts(operation["path"])
            if kind in ("move", "copy"):
                source = _parts(operation["from"])
                value = deepcopy(_get(result, source))
                if kind == "move":
                    _take(result, source)
                _put(result, path, value)
            elif kind == "remove":
                _take(result, path)
            elif kind == "test":
                if _get(result, path) != operation["value"]:
                    raise Refused(422, f"testing value {operation['path']} failed")
            elif kind in ("add", "replace"):
                if kind == "replace":
                    _take(result, path)
                _put(result, path, deepcopy(operation["value"]))
            else:
                raise Refused(400, f"unknown operation {kind!r}")
        except (KeyError, IndexError, ValueError, TypeError) as error:
            text = f"the server rejected our request due to an error in our request: {error!r}"
            raise Refused(422, text) from error
    return result


def _parts(path: str) -> list[str]:
    if not path.startswith("/"):
        raise ValueError(f"path {path!r} does not begin with /")
    return [part.replace("~1", "/").replace("~0", "~") for part in path[1:].split("/")]


def _get(node: Any, parts: list[str]) -> Any:
    for part in parts:
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


def _take(root: Any, parts: list[str]) -> None:
    node = _get(root, parts[:-1])
    del node[int(parts[-1]) if isinstance(node, list) else parts[-1]]


def _put(root: Any, parts: list[str], value: Any) -> None:
    node = _get(root, parts[:-1])
    if not isinstance(node, list):
        node[parts[-1]] = value
    else:
        node.insert(len(node) if parts[-1] == "-" else int(parts[-1]), value)
