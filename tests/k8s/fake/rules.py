"""Rules in CEL, `x-kubernetes-validations`: evaluated on objects, looked at in definitions.

A rule that fails by an error has not held. Rules about the old object (`oldSelf`) are none of this
project's and are refused, so that none goes unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import cel

RULES = "x-kubernetes-validations"
_PATH = re.compile(r"\bself((?:\.[A-Za-z_]\w*)+)(\()?")
Problem = tuple[str, str]  # field, message


def violations(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[Problem]:
    """What in `value`, defaulted and valid by its schema, breaks a rule."""
    for rule in schema.get(RULES) or ():
        try:
            holds = _compiled(rule["rule"]).execute({"self": value})
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            yield path or "<root>", f"rule: {rule['rule']}: {error!r}"
            continue
        if holds is not True:
            yield path or "<root>", rule.get("message") or f"failed rule: {rule['rule']}"
    if isinstance(value, dict):
        extra = schema.get("additionalProperties")
        properties = schema.get("properties") or {}
        for key, item in value.items():
            below = properties.get(key, extra if isinstance(extra, dict) else None)
            if below is not None:
                yield from violations(item, below, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from violations(item, schema.get("items") or {}, f"{path}[{i}]")


def wrong(schema: dict[str, Any], path: str) -> Iterator[Problem]:
    """What a server would not take of the rules of one mapping.

    Their cost is bounded by what they touch, so each list, mapping and string that a rule names
    must have a limit.
    """
    for i, rule in enumerate(schema.get(RULES) or ()):
        where, text = f"{path}.{RULES}[{i}].rule", rule["rule"]
        if "oldSelf" in text:
            yield where, "transition rules are not evaluated here"
        if "\n" in rule.get("message", ""):
            yield where, "message must not contain line breaks"
        try:
            _compiled(text)
        except ValueError as error:
            yield where, f"compilation failed: {error}"
        for found in _PATH.finditer(text):
            names = found[1].strip(".").split(".")
            yield from _bounded(schema, names[:-1] if found[2] else names, where)


def _bounded(schema: dict[str, Any], names: list[str], where: str) -> Iterator[Problem]:
    node = schema
    for name in names:
        properties = node.get("properties") or {}
        if name not in properties:
            yield where, f"undefined field '{name}'"
            return
        node = properties[name]
    while node.get("type") == "array":
        if "maxItems" not in node:
            yield where, f"estimated cost exceeds budget: {'.'.join(names)} has no maxItems"
        node = node["items"]
    if node.get("type") == "string" and not {"maxLength", "enum"} & set(node):
        yield where, f"estimated cost exceeds budget: {'.'.join(names)} has no maxLength"
    if "additionalProperties" in node and "maxProperties" not in node:
        yield where, f"estimated cost exceeds budget: {'.'.join(names)} has no maxProperties"


@lru_cache(maxsize=1024)
def _compiled(text: str) -> cel.Program:
    """Raises ValueError for what is no expression."""
    return cel.compile(text)
