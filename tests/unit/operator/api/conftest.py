"""A small valid object, and ways to change it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tknp_operator.api.docs import CPU_SAMPLE

Object = dict[str, Any]


@pytest.fixture
def changed() -> Callable[..., Object]:
    """changed("decode.nodes", 3, ...): the CPU sample with fields of its spec set, or removed."""

    def change(*pairs: Any) -> Object:
        obj = yaml.safe_load(CPU_SAMPLE)
        obj["metadata"]["namespace"] = "default"
        for path, value in zip(pairs[::2], pairs[1::2], strict=True):
            *parents, last = path.split(".")
            where = obj["spec"]
            for parent in parents:
                where = where.setdefault(parent, {})
            if value is None:
                del where[last]
            else:
                where[last] = copy.deepcopy(value)
        return obj

    return change
