"""What a server asks of a CustomResourceDefinition before it takes it.

Its schema is structural: every value has a type, lists have items, maps-in-lists have keys that are
always there. Defaults are valid, pruned, and keep the rules of their mapping *before* the defaults
inside them are filled in, as Kubernetes looks at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from . import rules, schema
from .errors import invalid

_LIST, _KEYS = "x-kubernetes-list-type", "x-kubernetes-list-map-keys"
_FORBIDDEN = ("$ref", "definitions", "dependencies", "patternProperties", "id", "const")
Problem = tuple[str, str]


def check(crd: dict[str, Any]) -> None:
    """Raise Refused 422 with what is wrong."""
    spec, problems = crd["spec"], []
    for i, version in enumerate(spec["versions"]):
        path = f"spec.versions[{i}]"
        top = version["schema"]["openAPIV3Schema"]
        problems += _structural(top, f"{path}.schema.openAPIV3Schema")
        metadata = (top.get("properties") or {}).get("metadata") or {}
        if set(metadata.get("properties") or {}) - {"name", "generateName"}:
            problems.append((path, "metadata: must not specify anything other than name and "
                                   "generateName"))  # fmt: skip
        for column in version.get("additionalPrinterColumns") or ():
            if not column["jsonPath"].startswith("."):
                problems.append((path, f"jsonPath {column['jsonPath']} must begin with ."))
        scale = (version.get("subresources") or {}).get("scale") or {}
        for name, start in (("specReplicasPath", ".spec."), ("statusReplicasPath", ".status.")):
            if scale and not scale[name].startswith(start):
                problems.append((path, f"{name} must be a path under {start}"))
    if spec["scope"] not in ("Namespaced", "Cluster"):
        problems.append(("spec.scope", f"Unsupported value: {spec['scope']}"))
    if crd["metadata"]["name"] != f"{spec['names']['plural']}.{spec['group']}":
        problems.append(("metadata.name", "must be spec.names.plural+'.'+spec.group"))
    if problems:
        raise invalid("CustomResourceDefinition", crd["metadata"]["name"], problems)


def _structural(node: dict[str, Any], path: str) -> Iterator[Problem]:
    yield from ((path, f"{word} is forbidden") for word in _FORBIDDEN if word in node)
    kind = node.get("type", "")
    untyped = node.get("x-kubernetes-int-or-string") or node.get(
        "x-kubernetes-preserve-unknown-fields"
    )
    if not kind and not untyped:
        yield f"{path}.type", "Required value: must not be empty"
    if "default" in node:
        yield from _default(node, f"{path}.default")
    if kind == "array":
        if "items" not in node:
            yield f"{path}.items", "Required value: must be specified"
        else:
            yield from _structural(node["items"], f"{path}.items")
        yield from _keys(node, path)
    if "properties" in node and "additionalProperties" in node:
        yield path, "additionalProperties and properties are mutual exclusive"
    for name, part in (node.get("properties") or {}).items():
        yield from _structural(part, f"{path}.properties[{name}]")
    extra = node.get("additionalProperties")
    if isinstance(extra, dict):
        yield from _structural(extra, f"{path}.additionalProperties")
    yield from rules.wrong(node, path)


def _default(node: dict[str, Any], path: str) -> Iterator[Problem]:
    value = node["default"]
    if schema.prune(value, node) != value:
        yield path, "must not have unknown fields"
    found = list(schema.problems(value, node))
    yield from ((path, message) for _, message in found)
    if not found:
        yield from ((path, message) for _, message in rules.violations(value, node))


def _keys(node: dict[str, Any], path: str) -> Iterator[Problem]:
    """Keys of a list that is a map: scalars that every item has."""
    if node.get(_LIST, "atomic") not in ("atomic", "set", "map"):
        yield f"{path}.{_LIST}", f"Unsupported value: {node[_LIST]}"
    if node.get(_LIST) != "map":
        return
    items = node.get("items") or {}
    for key in node.get(_KEYS) or [""]:
        part = (items.get("properties") or {}).get(key)
        if part is None or part.get("type") in ("object", "array"):
            yield f"{path}.{_KEYS}", f"Invalid value: {key!r}: must be a scalar of items"
        elif key not in (items.get("required") or ()) and "default" not in part:
            yield f"{path}.items.properties[{key}].default", "Required value: a key of the list"
