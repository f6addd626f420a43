"""Errors as gRPC clients of the gateway read them."""

from __future__ import annotations

from tknp.client import RequestFailed
from tknp.errors import TknpError
from tknp.gateway.openai.errors import reply_of
from tknp.rpc import details


def message_of(error: TknpError) -> str:
    """What a client is told: of a pool's refusal the pool's own words."""
    return error.message if isinstance(error, RequestFailed) else str(error)


def trailers_of(error: TknpError) -> list[tuple[str, bytes]]:
    """Trailing metadata of a call that ends with `error`."""
    value = details.details_of(error.status, message_of(error), reply_of(error).param)
    return [] if value is None else [(details.KEY, value)]
