"""The gateway's services on a gRPC server: Inference, Open Inference, health and reflection.

    call -> method of the call's name in `grpc_face` or `kserve` -> messages
         -> TknpError -> status, google.rpc details in the trailers

Methods are found in the protos' descriptors: one that is added there needs a method of its face
only. A call that is cancelled, or whose deadline passes, cancels its handler and so its request at
the pool. So does a client that has not read an answer `UNREAD_S` after the deadline of its request.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tknp.errors import DeadlineExceeded, TknpError
from tknp.gateway.gateway import Gateway
from tknp.gateway.generation import UNREAD_S
from tknp.gateway.grpc_face import InferenceFace
from tknp.gateway.kserve import OpenInferenceFace
from tknp.gateway.rich_errors import message_of, trailers_of
from tknp.metrics.instruments import reason_of
from tknp.v1 import inference_pb2, open_inference_pb2

log = logging.getLogger(__name__)
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"]
OPEN_INFERENCE = open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_AGAIN_S = 0.1
Context = aio.ServicerContext[Any, Any]
_HANDLERS = {
    False: grpc.unary_unary_rpc_method_handler, True: grpc.unary_stream_rpc_method_handler,
}  # fmt: skip


def add_services(server: aio.Server, gateway: Gateway) -> None:
    """Let `server` answer for `gateway`."""
    faces: tuple[tuple[ServiceDescriptor, Any], ...] = (
        (INFERENCE, InferenceFace(gateway)), (OPEN_INFERENCE, OpenInferenceFace(gateway)),
    )  # fmt: skip
    for service, face in faces:
        handlers = {m.name: _handler(gateway, m, face) for m in service.methods}
        generic = grpc.method_handlers_generic_handler(service.full_name, handlers)
        server.add_generic_rpc_handlers((generic,))
    health_pb2_grpc.add_HealthServicer_to_server(Health(gateway), server)
    names = [service.full_name for service in (INFERENCE, OPEN_INFERENCE, HEALTH)]
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """grpc.health.v1: whether some pool takes requests, whichever service is asked about."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: object = None
    ) -> health_pb2.HealthCheckResponse:
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if self._gateway.ready else status.NOT_SERVING)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: object = None
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """Now, and whenever it changes, until this replica leaves."""
        said = None
        while True:
            leaving = self._gateway.leaving
            now = await self.Check(request)
            if now != said:
                said = now
                yield now
            if leaving:
                return
            await self._gateway.pools.looked()


def _handler(
    gateway: Gateway, method: MethodDescriptor, face: Any
) -> grpc.RpcMethodHandler[Any, Any]:
    name = method.name
    call: Callable[..., Any] = getattr(face, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())

    async def unary(request: Any, context: Context) -> Any:
        answering: Awaitable[Any] = call(request, _metadata(context))
        try:
            answer = await answering
        except Exception as error:
            await _refuse(gateway, name, error, context)
        gateway.metrics.answered(name, "ok")
        return answer

    async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            until_s = gateway.deadline_s(request.timeout_s) + UNREAD_S
            async with (
                aclosing(call(request, _metadata(context))) as responses,
                _ended(responses, until_s) as late,
            ):
                async for response in responses:
                    yield response
                if late.done():
                    raise DeadlineExceeded("what came had not been read when the time was up")
        except Exception as error:
            await _refuse(gateway, name, error, context)
        gateway.metrics.answered(name, "ok")

    chosen: Any = stream if method.server_streaming else unary
    parse, write = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    make: Callable[..., grpc.RpcMethodHandler[Any, Any]] = _HANDLERS[method.server_streaming]
    return make(chosen, parse.FromString, write.SerializeToString)


@asynccontextmanager
async def _ended(
    responses: AsyncGenerator[Any, None], until_s: float
) -> AsyncIterator[asyncio.Task[None]]:
    """Close `responses` at `until_s`, if this context lasts so long: the task that does so.

    Whoever iterates is stuck then, since a message is not sent before the one before it has been
    read. A status isn't either, so the call itself goes on, but holds nothing.
    """

    async def end() -> None:
        wait_s = until_s - time.monotonic()
        while True:
            await asyncio.sleep(wait_s)
            try:
                return await responses.aclose()
            except RuntimeError:  # it makes a message just now
                wait_s = _AGAIN_S

    task = asyncio.create_task(end())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _metadata(context: Context) -> dict[str, str]:
    """Text of the call's metadata; what is binary says nothing to a gateway."""
    given = context.invocation_metadata() or ()
    return {key: value for key, value in given if isinstance(value, str)}


async def _refuse(gateway: Gateway, name: str, error: Exception, context: Context) -> None:
    """End the call with the status of `error`; always raises."""
    gateway.metrics.answered(name, reason_of(error))
    if not isinstance(error, TknpError):
        log.error("%s failed", name, exc_info=error)
        error = TknpError(f"{name} failed; the gateway's log has it")
    trailers: Any = tuple(trailers_of(error))  # binary, as the key's ending says
    await context.abort(grpc.StatusCode[error.status], message_of(error), trailers)
