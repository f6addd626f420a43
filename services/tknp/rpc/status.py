"""One table between our errors and gRPC status codes, used by servers and clients alike.

    bytes -> size checked -> parsed -> handler -> answer, or a TknpError -> its status

What a peer sent, and what an unexpected error says, stays out of statuses; request ids are logged.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from inspect import iscoroutinefunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from tknp.errors import (
    CapacityError,
    DeadlineExceeded,
    InvalidValue,
    ProtocolError,
    TknpError,
    Unavailable,
)
from tknp.rpc.details import KEY, details_of
from tknp.rpc.limits import request_bytes

log = logging.getLogger(__name__)


class Refused(TknpError):
    """A message that can't be taken, here or by the peer that it was sent to."""

    status = "INVALID_ARGUMENT"


_BY_STATUS: dict[str, type[TknpError]] = {
    "INVALID_ARGUMENT": Refused,
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
    """Parses requests and turns a TknpError of a handler into its status.

    Anything unexpected is logged and answered INTERNAL without its text.
    """

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
        parse = partial(_parse, handler.request_deserializer, method, request_bytes(method))

        async def many(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for data in requests:
                yield parse(data)

        take: Callable[[Any], Any] = many if handler.request_streaming else parse

        async def unary(data: Any, context: aio.ServicerContext[Any, Any]) -> Any:
            answer = handler.unary_unary or handler.stream_unary
            request = None
            try:
                request = take(data)
                return await answer(request, context)
            except Exception as error:
                await _abort(context, error, method, request)

        behaviour = handler.unary_stream or handler.stream_stream

        async def stream(data: Any, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            request = None
            try:
                request = take(data)
                async for response in behaviour(request, context):
                    yield response
            except Exception as error:
                await _abort(context, error, method, request)

        async def writing(data: Any, context: aio.ServicerContext[Any, Any]) -> None:
            request = None
            try:
                request = take(data)
                await behaviour(request, context)
            except Exception as error:
                await _abort(context, error, method, request)

        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        wrapped: Any = stream if handler.response_streaming else unary
        if handler.response_streaming and iscoroutinefunction(behaviour):
            wrapped = writing  # its answers go by the context, as those of gRPC's health service
        return make(wrapped, None, handler.response_serializer)


def _parse(deserialize: Callable[[bytes], Any], method: str, most: int, data: bytes) -> Any:
    if len(data) > most:
        raise Refused(f"{method} takes messages of at most {most} bytes, not {len(data)}")
    try:
        return deserialize(data)
    except DecodeError:
        raise Refused(f"the {len(data)} bytes are not a request of {method}") from None


async def _abort(
    context: aio.ServicerContext[Any, Any], error: Exception, method: str, request: Any
) -> None:
    if isinstance(error, aio.AioRpcError):  # of a call that the handler made
        error = error_from(error, "a peer")
    if isinstance(error, TknpError):
        field = error.field if isinstance(error, InvalidValue) else None
        value = details_of(error.status, str(error), field)
        trailers = () if value is None else ((KEY, value),)
        await context.abort(code_of(error), str(error), trailers)
    if isinstance(error, aio.AbortError | asyncio.CancelledError):
        raise error
    log.error("%s%s failed", method, _named(request), exc_info=error)
    name = type(error).__name__
    await context.abort(grpc.StatusCode.INTERNAL, f"{method}: {name}; the server's log has it")


def _named(request: Any) -> str:
    """The request id that a message carries, for the log."""
    request_id = getattr(getattr(request, "key", request), "request_id", "")
    return f" for {request_id}" if request_id else ""
