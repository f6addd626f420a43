"""Label and field selectors as clients write them in a query."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .errors import Refused

Matches = Callable[[dict[str, Any]], bool]
_SET = re.compile(r"^\s*(\S+)\s+(in|notin)\s+\(([^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*([^!=\s]+)\s*(==|=|!=)\s*(\S*)\s*$")
# Beyond these two, which every kind has.
_FIELDS = {
    "Pod": {"spec.nodeName", "status.phase", "status.podIP", "spec.restartPolicy"},
    "Event": {"involvedObject.kind", "involvedObject.name", "involvedObject.namespace",
              "involvedObject.uid", "reason", "type"},
    "Node": {"spec.unschedulable"},
    "Secret": {"type"},
    "Namespace": {"status.phase"},
}  # fmt: skip


def labels(text: str) -> Matches:
    """`a=b,c!=d,e in (f,g),h,!i`. Raises Refused 400 for what can't be parsed."""
    requirements = [_requirement(part) for part in re.split(r",(?![^(]*\))", text) if part.strip()]

    def matches(obj: dict[str, Any]) -> bool:
        have = obj["metadata"].get("labels") or {}
        return all(requirement(have) for requirement in requirements)

    return matches


def _requirement(part: str) -> Callable[[dict[str, str]], bool]:
    if found := _SET.match(part):
        key, operator, listed = found.groups()
        values = {value.strip() for value in listed.split(",")}
        if operator == "in":
            return lambda have: have.get(key) in values
        return lambda have: have.get(key) not in values
    if found := _EQUAL.match(part):
        key, operator, value = found.groups()
        if operator == "!=":
            return lambda have: have.get(key) != value
        return lambda have: have.get(key) == value
    key = part.strip()
    if re.fullmatch(r"![\w./-]+", key):
        return lambda have: key[1:] not in have
    if re.fullmatch(r"[\w./-]+", key):
        return lambda have: key in have
    raise Refused(400, f"unable to parse requirement: {part!r}")


def fields(text: str, kind: str) -> Matches:
    """`metadata.name=x,status.phase!=Running`. Raises Refused 400 for fields that can't be used."""
    wanted = []
    for part in filter(None, text.split(",")):
        found = _EQUAL.match(part)
        if found is None:
            raise Refused(400, f"invalid selector: {part!r}")
        path, operator, value = found.groups()
        if path not in {"metadata.name", "metadata.namespace", *_FIELDS.get(kind, ())}:
            raise Refused(400, f"field label not supported: {path}")
        wanted.append((path.split("."), operator == "!=", value))

    def matches(obj: dict[str, Any]) -> bool:
        for path, negated, value in wanted:
            current: Any = obj
            for name in path:
                current = (current or {}).get(name)
            if ((str(current) if current is not None else "") == value) == negated:
                return False
        return True

    return matches
