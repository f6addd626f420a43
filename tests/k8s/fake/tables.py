"""Lists as kubectl asks for them: a Table with a CustomResourceDefinition's printer columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from .kinds import Kind

_STEP = re.compile(r"\.([\w-]+)|\[\?\(@\.([\w-]+)=='([^']*)'\)\]")
_AGE = {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
Object = dict[str, Any]


def wanted(accept: str) -> bool:
    """Whether the first choice of `accept` is a Table."""
    return "as=Table" in accept.partition(",")[0]


def table(kind: Kind, items: list[Object], metadata: Object) -> Object:
    """Rows of `items`; `metadata`: of the list."""
    columns = [*kind.columns] or [_AGE]
    definitions = [{"name": "Name", "type": "string", "format": "name", "priority": 0}]
    definitions += [
        {"name": c["name"], "type": c["type"], "format": "", "priority": c.get("priority", 0)}
        for c in columns
    ]
    return {
        "kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata,
        "columnDefinitions": definitions, "rows": [_row(item, columns) for item in items],
    }  # fmt: skip


def _row(item: Object, columns: list[Object]) -> Object:
    cells: list[Any] = [item["metadata"]["name"]]
    for column in columns:
        value = next(iter(_at(item, column["jsonPath"])), None)
        cells.append(_since(value) if column["type"] == "date" and value else value)
    partial = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    return {"cells": cells, "object": {**partial, "metadata": item["metadata"]}}


def _at(value: Any, path: str) -> Iterator[Any]:
    """What a path of names and `[?(@.name=='word')]` leads to."""
    values = [value]
    for name, key, word in (found.groups() for found in _STEP.finditer(path)):
        if name:
            values = [v[name] for v in values if isinstance(v, dict) and name in v]
        else:
            values = [item for v in values for item in v if item.get(key) == word]
    yield from values


def _since(stamp: str) -> str:
    age_s = (datetime.now(UTC) - datetime.fromisoformat(stamp)).total_seconds()
    return f"{max(int(age_s), 0)}s"
