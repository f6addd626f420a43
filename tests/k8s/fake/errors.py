"""Refusals, as the Status objects that clients of Kubernetes read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound",
    405: "MethodNotAllowed", 409: "Conflict", 410: "Expired", 415: "UnsupportedMediaType",
    422: "Invalid", 429: "TooManyRequests", 500: "InternalError",
}  # fmt: skip


class Refused(Exception):
    """One Status with `code`; `reason` where it is not the usual one of that code."""

    def __init__(
        self, code: int, message: str, reason: str = "", causes: Sequence[dict[str, str]] = ()
    ) -> None:
        super().__init__(message)
        self.code, self.message = code, message
        self.reason = reason or REASONS[code]
        self.causes = list(causes)

    @property
    def status(self) -> dict[str, Any]:
        return {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "code": self.code,
            "details": {"causes": self.causes},
        }  # fmt: skip


def not_found(plural: str, name: str) -> Refused:
    return Refused(404, f'{plural} "{name}" not found')


def invalid(kind: str, name: str, problems: Sequence[tuple[str, str]]) -> Refused:
    """422 with one cause for each (field, message)."""
    causes = [{"reason": "FieldValueInvalid", "field": f, "message": m} for f, m in problems]
    text = ", ".join(f"{field}: {message}" for field, message in problems)
    return Refused(422, f'{kind} "{name}" is invalid: {text}', causes=causes)
