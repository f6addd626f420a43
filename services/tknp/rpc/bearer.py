"""The bearer token on a call: `authorization: Bearer TOKEN`, put there and asked for.

On TLS the token is a call credential, which gRPC refuses to send in clear text; without TLS, on
loopback, interceptors add it.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc import aio
from grpc_health.v1 import health

log = logging.getLogger(__name__)
_HEADER = "authorization"
_SCHEME = "Bearer "
_OPEN = f"/{health.SERVICE_NAME}/"


def open_channel(
    address: str,
    tls: grpc.ChannelCredentials | None,
    token: str | None,
    options: Sequence[tuple[str, Any]],
    interceptors: Sequence[Any] = (),
) -> aio.Channel:
    """A channel to `address` whose calls carry `token`, if there is one."""
    if tls is None:
        kinds = (_UnaryUnary, _UnaryStream, _StreamUnary, _StreamStream) if token else ()
        bearers: list[Any] = [kind(token) for kind in kinds if token]
        every = [*interceptors, *bearers]
        return aio.insecure_channel(address, options=options, interceptors=every)
    if token:
        call = grpc.access_token_call_credentials(token)
        tls = grpc.composite_channel_credentials(tls, call)
    return aio.secure_channel(address, tls, options=options, interceptors=[*interceptors])


class _Bearer:
    """Adds the token to the metadata of a call."""

    def __init__(self, token: str) -> None:
        self._pair = (_HEADER, _SCHEME + token)

    async def add(self, continuation: Callable[..., Any], details: Any, request: Any) -> Any:
        metadata = aio.Metadata(*(details.metadata or ()), self._pair)
        return await continuation(details._replace(metadata=metadata), request)


# gRPC files an interceptor under the first kind that it is, so that each kind is a class.
class _UnaryUnary(_Bearer, aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_unary = _Bearer.add  # type: ignore[assignment]


class _UnaryStream(_Bearer, aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_unary_stream = _Bearer.add  # type: ignore[assignment]


class _StreamUnary(_Bearer, aio.StreamUnaryClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_unary = _Bearer.add  # type: ignore[assignment]


class _StreamStream(_Bearer, aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    intercept_stream_stream = _Bearer.add  # type: ignore[assignment]


class TokenInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends calls without one of `tokens` before a byte of their messages is read.

    Health is exempt.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._values = [(_SCHEME + token).encode() for token in tokens]

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method
        if method.startswith(_OPEN):
            return await continuation(handler_call_details)
        shown = [
            value.encode() if isinstance(value, str) else value
            for key, value in handler_call_details.invocation_metadata
            if key == _HEADER
        ]
        if len(shown) == 1 and self._known(shown[0]):
            return await continuation(handler_call_details)
        return _refusal(method, "the token is wrong" if shown else "no token was given")

    def _known(self, shown: bytes) -> bool:
        # Each token is compared to its end, in constant time, so that time tells nothing.
        found = False
        for value in self._values:
            found |= hmac.compare_digest(shown, value)
        return found


def _refusal(method: str, why: str) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        log.warning("%s from %s: %s", method, context.peer(), why)
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED, f"{why}: send this pool's bearer token"
        )
        yield  # makes this a stream, which suits every kind of method

    return grpc.stream_stream_rpc_method_handler(refuse)
