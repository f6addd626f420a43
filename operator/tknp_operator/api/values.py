"""Values that several parts of a TokenParallelService have."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, PlainValidator, WithJsonSchema

from tknp_operator.api.rules import Part

Seconds = Annotated[int, Field(ge=1, le=86_400)]
Count = Annotated[int, Field(ge=1, le=1024)]
Key = Annotated[str, Field(max_length=317)]
"""A name of up to 63 characters behind a domain of up to 253, as of labels and resources."""
Free = dict[str, Any]
"""A mapping that Kubernetes itself checks when pods are made."""

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|[kMGTPE]|[KMGTPE]i)?$"


def _quantity(value: object) -> int | str:
    if (
        isinstance(value, bool)
        or not re.fullmatch(_QUANTITY, str(value))
        or isinstance(value, float)
    ):
        raise ValueError("write a whole number or a quoted quantity such as '500m' or '16Gi'")
    return value if isinstance(value, int) else str(value)


Quantity = Annotated[int | str, PlainValidator(_quantity), WithJsonSchema(
    {"x-kubernetes-int-or-string": True, "pattern": _QUANTITY})]  # fmt: skip


class Resources(Part):
    requests: dict[str, Quantity] = {}
    """What the scheduler sets aside."""
    limits: dict[str, Quantity] = {}
    """What the pod may use at most."""
