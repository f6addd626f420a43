"""Rules across fields, each written once for both who enforce it.

`cel` is what the API server evaluates when somebody applies an object, `holds` what `parse`
evaluates when the operator reads one (a server may be older than the rule). `message` is the same
for both and names the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic.alias_generators import to_camel


@dataclass(frozen=True)
class Rule:
    """`cel` sees the object as `self` with its YAML names, `holds` as a model."""

    cel: str
    holds: Callable[[Any], bool]
    message: str


class Part(BaseModel):
    """A mapping of the custom resource: immutable, camelCase in YAML, no unknown fields.

    Strict, as the API server is: no "4" for 4, no "yes" for true.
    """

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True,
        strict=True, use_attribute_docstrings=True,
    )  # fmt: skip
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="after")
    def _keeps_rules(self) -> Self:
        for rule in self.rules:
            if not rule.holds(self):
                raise ValueError(rule.message)
        return self
