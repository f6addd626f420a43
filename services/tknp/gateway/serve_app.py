"""The gateway as a Ray Serve application: replicas of one deployment, scaled and looked after.

    tknp gateway   client -> replica: `front` on the gateway's own ports (`ports`)
    serve run      client -> Serve's HTTP proxy -> replica: FastAPI app of `http`
                   client -> Serve's gRPC proxy -> replica: method of the call's name

`serve run tknp.gateway.serve_app:build pools=HOST:PORT` runs it on any Ray cluster, whose proxies
then are the door: their ports, TLS and options are that cluster's. `tknp gateway` starts a cluster
of its own, without proxies. Nothing but this file, `serve_limits` and `serve_run` knows of Ray.

Replicas are scaled by the streams that they have. One that is to go away takes no more, and Serve
waits for its last stream; an update starts the new replica before it ends the old one.

Serve's gRPC proxy gives methods no deadline of the call. It cancels a replica's call when its own
ends early, but only while it waits for the replica's next message: otherwise the request goes on at
its pool until it is done or its `timeout_s` has passed. What fails there ends with an empty message
and a status, since that proxy carries trailers on messages and not on exceptions.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.grpc_util import RayServegRPCContext
from ray.serve.handle import DeploymentHandle

from tknp.errors import InvalidValue, TknpError
from tknp.gateway.front import front
from tknp.gateway.gateway import Gateway
from tknp.gateway.grpc_face import InferenceFace
from tknp.gateway.grpc_server import Health
from tknp.gateway.http import create_app
from tknp.gateway.kserve import OpenInferenceFace
from tknp.gateway.logs import start_logging
from tknp.gateway.rich_errors import message_of, trailers_of
from tknp.gateway.scaling import STREAMS, TARGET, by_streams
from tknp.gateway.serve_limits import RemoteLedger, ledger_of
from tknp.gateway.settings import GatewaySettings, settings_from_text
from tknp.metrics.instruments import reason_of
from tknp.v1 import inference_pb2 as pb
from tknp.v1 import open_inference_pb2 as oi

log = logging.getLogger(__name__)
NAME = "tknp"
SERVICERS = (
    "tknp.v1.inference_pb2_grpc.add_InferenceServicer_to_server",
    "tknp.v1.open_inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server",
    "grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server",
)
_DRAIN_TICK_S = 1.0
_SURGE_PERCENT = 100  # all new replicas may be there before the old ones go
Context = RayServegRPCContext
Ask = TypeVar("Ask")
Answer = TypeVar("Answer")


@serve.deployment(name="gateway")
@serve.ingress()
class Replica:
    """One replica. Methods in capitals are called by Serve's gRPC proxy, by the call's name.

    `ports`: path of the gateway's `Ports`, to listen there; None: Serve's proxies are the door.
    `ledger`: of what keys have in flight at all replicas, see `serve_limits`.
    """

    def __init__(
        self, settings: GatewaySettings, ports: str | None = None,
        ledger: DeploymentHandle[Any] | None = None,
    ) -> None:  # fmt: skip
        start_logging(settings.log_file)
        self._ports = ports
        self._gateway = Gateway(settings, ledger=None if ledger is None else RemoteLedger(ledger))
        self._inference = InferenceFace(self._gateway)
        self._open_inference = OpenInferenceFace(self._gateway)
        self._health = Health(self._gateway)

    def __serve_build_asgi_app__(self) -> Any:
        if self._ports is None:
            return create_app(self._gateway, named=False)
        return create_app(self._gateway, around=partial(front, self._gateway, path=self._ports))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `by_streams` scales by."""
        return {STREAMS: float(self._gateway.inflight)}

    async def check_health(self) -> None:
        """Raises where no pool could ever be asked again; a pool that is away is no reason."""
        self._gateway.pools.check()

    async def Generate(
        self, request: pb.GenerateRequest, grpc_context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        try:
            stream = self._inference.generate(request, _metadata(grpc_context))
            async with aclosing(stream) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
            self._count("Generate", "ok")
        except Exception as error:
            self._fail("Generate", error, grpc_context)
            yield pb.GenerateResponse()

    async def GetModel(
        self, request: pb.GetModelRequest, grpc_context: Context
    ) -> pb.GetModelResponse:
        return await self._answer(
            "GetModel", self._inference.get_model, request, pb.GetModelResponse(), grpc_context
        )

    async def Tokenize(
        self, request: pb.TokenizeRequest, grpc_context: Context
    ) -> pb.TokenizeResponse:
        return await self._answer(
            "Tokenize", self._inference.tokenize, request, pb.TokenizeResponse(), grpc_context
        )

    async def Detokenize(
        self, request: pb.DetokenizeRequest, grpc_context: Context
    ) -> pb.DetokenizeResponse:
        return await self._answer(
            "Detokenize", self._inference.detokenize, request, pb.DetokenizeResponse(), grpc_context
        )

    async def ServerLive(
        self, request: oi.ServerLiveRequest, grpc_context: Context
    ) -> oi.ServerLiveResponse:
        return await self._answer(
            "ServerLive",
            self._open_inference.server_live,
            request,
            oi.ServerLiveResponse(),
            grpc_context,
        )

    async def ServerReady(
        self, request: oi.ServerReadyRequest, grpc_context: Context
    ) -> oi.ServerReadyResponse:
        return await self._answer(
            "ServerReady",
            self._open_inference.server_ready,
            request,
            oi.ServerReadyResponse(),
            grpc_context,
        )

    async def ModelReady(
        self, request: oi.ModelReadyRequest, grpc_context: Context
    ) -> oi.ModelReadyResponse:
        return await self._answer(
            "ModelReady",
            self._open_inference.model_ready,
            request,
            oi.ModelReadyResponse(),
            grpc_context,
        )

    async def ServerMetadata(
        self, request: oi.ServerMetadataRequest, grpc_context: Context
    ) -> oi.ServerMetadataResponse:
        return await self._answer(
            "ServerMetadata",
            self._open_inference.server_metadata,
            request,
            oi.ServerMetadataResponse(),
            grpc_context,
        )

    async def ModelMetadata(
        self, request: oi.ModelMetadataRequest, grpc_context: Context
    ) -> oi.ModelMetadataResponse:
        return await self._answer(
            "ModelMetadata",
            self._open_inference.model_metadata,
            request,
            oi.ModelMetadataResponse(),
            grpc_context,
        )

    async def ModelInfer(
        self, request: oi.ModelInferRequest, grpc_context: Context
    ) -> oi.ModelInferResponse:
        return await self._answer(
            "ModelInfer",
            self._open_inference.model_infer,
            request,
            oi.ModelInferResponse(),
            grpc_context,
        )

    async def Check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """grpc.health.v1: whether requests are taken, by a pool or to wait for one."""
        return await self._health.Check(request)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        async for response in self._health.Watch(request):
            yield response

    async def _answer(
        self, method: str, call: Callable[[Ask, dict[str, str]], Awaitable[Answer]], request: Ask,
        empty: Answer, context: Context,
    ) -> Answer:  # fmt: skip
        try:
            answer = await call(request, _metadata(context))
        except Exception as error:
            self._fail(method, error, context)
            return empty
        self._count(method, "ok")
        return answer

    def _fail(self, method: str, error: Exception, context: Context) -> None:
        """Let the call end with the status of `error`."""
        self._count(method, reason_of(error))
        if not isinstance(error, TknpError):
            log.error("%s failed", method, exc_info=error)
            error = TknpError(f"{method} failed; the gateway's log has it")
        context.set_code(grpc.StatusCode[error.status])
        context.set_details(message_of(error))
        trailers: Any = trailers_of(error)  # binary, as the key's ending says
        context.set_trailing_metadata(trailers)

    def _count(self, method: str, status: str) -> None:
        self._gateway.metrics.answered(method, status)


def application(settings: GatewaySettings, ports: str | None = None) -> serve.Application:
    """The gateway with `settings`, for `serve.run`. `ports`: path of its `Ports`, if it has any."""
    policy: Any = AutoscalingPolicy
    scaling = AutoscalingConfig(
        min_replicas=settings.min_replicas,
        max_replicas=settings.max_replicas,
        target_ongoing_requests=min(TARGET, settings.max_inflight),
        policy=policy() if ports is None else policy(policy_function=by_streams),
    )
    deployment: Any = Replica  # the decorator hides that it makes a Deployment
    bound: serve.Application = deployment.options(
        autoscaling_config=scaling,
        # Beyond `max_inflight` a replica refuses by itself, in words.
        max_ongoing_requests=2 * settings.max_inflight,
        graceful_shutdown_timeout_s=settings.timeout_s,
        graceful_shutdown_wait_loop_s=_DRAIN_TICK_S,
        max_surge_percent=_SURGE_PERCENT,
        ray_actor_options={"num_cpus": 0},
    ).bind(settings, ports, ledger_of(settings))
    return bound


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application that `args` describe: what `serve run`, `serve build` and configs name.

    Values may be text, as a command line gives them: `pools=HOST:PORT,HOST:PORT`. `settings=FILE`
    reads the rest from a YAML file. Raises InvalidValue, also for what only a gateway that listens
    itself can keep.
    """
    settings = settings_from_text(args)
    for name in ("http_cert", "http_key", "http_client_ca"):
        if (value := getattr(settings, name)) is not None:
            remedy = "has no effect here: TLS is the cluster's http_options"
            raise InvalidValue(name, value, remedy)
    return application(settings)


def _metadata(context: Context) -> dict[str, str]:
    return dict(context.invocation_metadata())
