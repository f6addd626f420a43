"""Errors in OpenAI's shape, with the HTTP status that clients expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tknp.client import RequestFailed
from tknp.errors import InvalidValue, TknpError
from tknp.rpc.details import RETRY_AFTER_S

# gRPC status name -> HTTP status and OpenAI's type of error.
_HTTP: dict[str, tuple[int, str]] = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "UNAUTHENTICATED": (401, "authentication_error"),
    "PERMISSION_DENIED": (403, "permission_error"),
    "NOT_FOUND": (404, "not_found_error"),
    "DEADLINE_EXCEEDED": (408, "timeout_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "CANCELLED": (499, "cancelled_error"),
    "UNAVAILABLE": (503, "service_unavailable_error"),
}
_PARAMS = {"json_schema": "response_format"}  # what clients call a field of the pool
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


@dataclass(frozen=True)
class ErrorReply:
    """What a client is told. `param`: the field at fault, where there is one."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        if self.status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}


def reply_of(error: TknpError) -> ErrorReply:
    """What `error` is to an HTTP client; what a pool said reaches it unchanged."""
    message = error.message if isinstance(error, RequestFailed) else str(error)
    status, kind = _HTTP.get(error.status, (500, "server_error"))
    param = error.field if isinstance(error, InvalidValue) else _field(message, status)
    param = _PARAMS.get(param or "", param)
    return ErrorReply(status, message, kind, param, _CODES.get(status))


def _field(message: str, status: int) -> str | None:
    """The field that a pool's refusal begins with: `field=value: remedy`."""
    name, equals, _ = message.partition("=")
    return name if status == 400 and equals and name.replace("_", "").isalnum() else None
