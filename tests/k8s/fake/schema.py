"""Structural schemas of custom resources: pruning, defaulting, validation by type and limits."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import jsonschema

_INT_OR_STRING = "x-kubernetes-int-or-string"
_KEEP = "x-kubernetes-preserve-unknown-fields"
_TOP = ("apiVersion", "kind", "metadata")
_VALIDATORS: dict[int, tuple[dict[str, Any], Any]] = {}  # by identity of the schema, which stays


def prune(value: Any, schema: dict[str, Any], top: bool = False) -> Any:
    """`value` without the fields that `schema` doesn't know."""
    if isinstance(value, list):
        return [prune(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    properties, extra = schema.get("properties") or {}, schema.get("additionalProperties")
    result = {}
    for key, item in value.items():
        if top and key in _TOP:
            result[key] = item
        elif key in properties:
            result[key] = prune(item, properties[key])
        elif isinstance(extra, dict):
            result[key] = prune(item, extra)
        elif extra is True or schema.get(_KEEP):
            result[key] = item
    return result


def default(value: Any, schema: dict[str, Any]) -> Any:
    """`value` with the defaults of `schema` where fields are absent, or null without `nullable`."""
    if isinstance(value, list):
        return [default(item, schema.get("items") or {}) for item in value]
    if not isinstance(value, dict):
        return value
    result = dict(value)
    for key, part in (schema.get("properties") or {}).items():
        if result.get(key) is None and not (key in result and part.get("nullable")):
            result.pop(key, None)
            if "default" in part:
                result[key] = deepcopy(part["default"])
        if key in result:
            result[key] = default(result[key], part)
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        known = schema.get("properties") or {}
        result |= {k: default(v, extra) for k, v in result.items() if k not in known}
    return result


def problems(value: Any, schema: dict[str, Any]) -> list[tuple[str, str]]:
    """Field and message of each violation."""
    known = _VALIDATORS.get(id(schema))
    if known is None or known[0] is not schema:
        known = _VALIDATORS[id(schema)] = schema, jsonschema.Draft202012Validator(_plain(schema))
    errors = sorted(known[1].iter_errors(value), key=_field)
    return [(_field(error), error.message) for error in errors]


def _field(error: jsonschema.ValidationError) -> str:
    text = ""
    for part in error.absolute_path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text or "<root>"


def _plain(schema: Any) -> Any:
    """OpenAPI v3 as Kubernetes writes it -> JSON Schema."""
    if isinstance(schema, list):
        return [_plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: _plain(part) for name, part in value.items()}
        elif key in ("default", "enum", "example"):
            result[key] = value
        else:
            result[key] = _plain(value)
    for name in ("Minimum", "Maximum"):
        if result.pop(f"exclusive{name}", False) is True:
            result[f"exclusive{name}"] = result.pop(name.lower())
    if result.get(_INT_OR_STRING):
        result.pop("type", None)
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if result.pop("nullable", False) and "type" in result:
        result["type"] = [result["type"], "null"]
    result.pop("format", None)
    return result
