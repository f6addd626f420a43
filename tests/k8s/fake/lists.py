"""Which lists are maps in disguise: their items have an identity and merge one by one.

Built-in types declare it in Go, custom ones by `x-kubernetes-list-type`. The table has what this
project's manifests contain; every other list is atomic.
"""

from __future__ import annotations

from typing import Any

# Name of the list -> keys of an item; () is a set of scalars.
BUILTIN: dict[str, tuple[str, ...]] = {
    "containers": ("name",), "initContainers": ("name",), "ephemeralContainers": ("name",),
    "env": ("name",), "volumes": ("name",), "volumeMounts": ("mountPath",),
    "imagePullSecrets": ("name",), "conditions": ("type",), "ownerReferences": ("uid",),
    "finalizers": (), "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
    "hostAliases": ("ip",), "resourceClaims": ("name",), "claims": ("name",),
}  # fmt: skip
METADATA = ("ownerReferences", "finalizers")


def keys_of(name: str, value: list[Any], schema: dict[str, Any] | None) -> tuple[str, ...] | None:
    """Keys of the items of list `name`, () for a set, None for an atomic list.

    `schema`: of the list, in a custom resource. `ports` are keyed by port and protocol.
    """
    if schema is not None and name not in METADATA:
        kind = schema.get("x-kubernetes-list-type")
        if kind == "map":
            return tuple(schema["x-kubernetes-list-map-keys"])
        return () if kind == "set" else None
    if name == "ports" and value and all(isinstance(item, dict) for item in value):
        port = "containerPort" if "containerPort" in value[0] else "port"
        keys: tuple[str, ...] | None = (port, "protocol")
    else:
        keys = BUILTIN.get(name)
    if keys and not all(isinstance(item, dict) and set(keys) <= set(item) for item in value):
        return None
    return keys


def identity(item: Any, keys: tuple[str, ...]) -> Any:
    """What makes `item` itself in its list."""
    return tuple(item[key] for key in keys) if keys else item


def below(schema: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    """The schema of property `name`; None stays None: a built-in type."""
    if schema is None or name == "metadata":
        return None
    found = (schema.get("properties") or {}).get(name)
    if found is None:
        extra = schema.get("additionalProperties")
        found = extra if isinstance(extra, dict) else {}
    return dict(found)
