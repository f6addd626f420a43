"""Typed errors of the whole system.

Each names what the user can change. `status` is the gRPC status name it maps to; the gateway
maps the same name to HTTP.
"""

from __future__ import annotations


class TknpError(Exception):
    """Root of every error that this project raises on purpose."""

    status = "INTERNAL"


class InvalidValue(TknpError, ValueError):
    """A value that can never be accepted: names field, value and remedy."""

    status = "INVALID_ARGUMENT"

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"{field}={value!r}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class CheckpointError(TknpError):
    """A checkpoint that can't be served: names file, tensor and what was expected."""

    status = "FAILED_PRECONDITION"


class CapacityError(TknpError):
    """Not enough room now; the same call may succeed later."""

    status = "RESOURCE_EXHAUSTED"


class ProtocolError(TknpError):
    """Two services disagree on epoch, stream, step, page state or version."""

    status = "FAILED_PRECONDITION"


class DeadlineExceeded(TknpError):
    """A peer did not answer within the time allowed."""

    status = "DEADLINE_EXCEEDED"


class Unavailable(TknpError):
    """A service is not ready, is draining or has died."""

    status = "UNAVAILABLE"
