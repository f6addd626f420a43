"""What the OpenAPI document says of answers."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel


class ErrorDetail(BaseModel):
    """`param`: the field at fault, where there is one."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error."""

    error: ErrorDetail


_WHY = {
    400: "A value that can't be served.",
    401: "No API key, or an unknown one.",
    404: "No such model.",
    408: "Not done in time.",
    413: "The body is too large.",
    422: "The body doesn't fit its schema.",
    429: "A limit is reached; Retry-After says when to come again.",
    503: "No pool takes requests; Retry-After says when to come again.",
}

Responses = dict[int | str, dict[str, Any]]


def errors(*statuses: int) -> Responses:
    """Answers of these statuses; without any, all."""
    return {s: {"model": ErrorBody, "description": _WHY[s]} for s in statuses or tuple(_WHY)}


GENERATED: Responses = {
    200: {
        "description": "The answer, or with stream: true server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    },
    **errors(),
}
