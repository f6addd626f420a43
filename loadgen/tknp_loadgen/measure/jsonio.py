"""JSON that any parser reads, +inf included.

Python writes `Infinity`, which is not JSON. `1e999` is, and every parser of double-precision
numbers reads it as infinity.
"""

from __future__ import annotations

import json
import math
from typing import Any

_MARK = "\x00inf"


def dumps(value: Any) -> str:
    """Indented; NaN becomes null, infinity 1e999."""
    text = json.dumps(_plain(value), indent=1, allow_nan=False)
    return text.replace(json.dumps(_MARK), "1e999").replace(json.dumps("-" + _MARK), "-1e999")


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isnan(value):
            return None
        if math.isinf(value):
            return _MARK if value > 0 else "-" + _MARK
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
