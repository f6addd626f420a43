"""One table between our errors and gRPC status codes, used by servers and clients alike."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc import aio

from tknp.errors import (
    CapacityError,
    DeadlineExceeded,
    ProtocolError,
    TknpError,
    Unavailable,
)

log = logging.getLogger(__name__)
_BY_STATUS: dict[str, type[TknpError]] = {
    "INVALID_ARGUMENT": TknpError,
    "RESOURCE_EXHAUSTED": CapacityError,
    "FAILED_PRECONDITION": ProtocolError,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNAVAILABLE": Unavailable,
}


def code_of(error: TknpError) -> grpc.StatusCode:
    """Status code that `error` travels as."""
    code: grpc.StatusCode = grpc.StatusCode[error.status]
    return code


def error_from(error: aio.AioRpcError, peer: str) -> TknpError:
    """What `error`, raised by a call to `peer`, means here."""
    kind = _BY_STATUS.get(error.code().name, TknpError)
    return kind(f"{peer}: {error.details() or error.code().name}")


class ErrorInterceptor(aio.ServerInterceptor):  # type: ignore[type-arg]
    """Turns a TknpError of a handler into its status; logs anything unexpected and hides it."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # an unknown method: gRPC answers UNIMPLEMENTED
            return handler  # type: ignore[return-value]
        method = handler_call_details.method

        async def unary(request: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            behaviour = handler.unary_unary or handler.stream_unary
            try:
                return await behaviour(request, context)
            except Exception as error:
                await _abort(context, error, method)

        async def stream(
            request: Any, context: aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            behaviour = handler.unary_stream or handler.stream_stream
            try:
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:
                await _abort(context, error, method)

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        wrapped: Any = stream if handler.response_streaming else unary
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


async def _abort(context: aio.ServicerContext[Any, Any], error: Exception, method: str) -> None:
    if isinstance(error, TknpError):
        await context.abort(code_of(error), str(error))
    if isinstance(error, aio.AbortError | asyncio.CancelledError):
        raise error
    log.exception("%s failed", method)
    await context.abort(grpc.StatusCode.INTERNAL, f"{method}: {type(error).__name__}: {error}")
