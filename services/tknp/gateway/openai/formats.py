"""`response_format`: output that is JSON, any object or what a schema describes.

`strict` changes nothing here: every schema is enforced, token by token, and one that can't be is
refused, as OpenAI does under `strict: true`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool

ANY_OBJECT = '{"type":"object"}'


class TextFormat(BaseModel):
    """Any text; the default."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    """A JSON object of any shape."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_object"]


class NamedSchema(BaseModel):
    """`name` and `description` are for people."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: StrictBool | None = None


class JsonSchemaFormat(BaseModel):
    """JSON that a schema describes."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


def schema_of(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> str:
    """The schema that a pool is given; empty for text. Properties keep their order."""
    if isinstance(wanted, JsonSchemaFormat):
        schema = wanted.json_schema.json_schema
        return json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return ANY_OBJECT if isinstance(wanted, JsonObjectFormat) else ""
