"""Servers and channels with the options that every service uses."""

from __future__ import annotations

from collections.abc import Sequence

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tknp.errors import Unavailable
from tknp.rpc.bearer import TokenInterceptor, open_channel
from tknp.rpc.limits import RESPONSE_BYTES, port_bytes
from tknp.rpc.security import PLAINTEXT, Security
from tknp.rpc.status import ErrorInterceptor
from tknp.rpc.tracing import CarryTrace, TracedCalls

LIVENESS = "tknp.liveness"
_OPTIONS = [
    ("grpc.keepalive_time_ms", 3_000),  # a frozen or cut-off peer is noticed within 7 s
    ("grpc.keepalive_timeout_ms", 4_000),
    ("grpc.http2.ping_timeout_ms", 4_000),  # 60 s else, whatever the line above says
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
_CHANNEL_OPTIONS = [
    *_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),  # a peer that is back is used again at once
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A pod's name resolves once the pod is there, and to another address once it was replaced.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    ("grpc.max_receive_message_length", RESPONSE_BYTES),
    ("grpc.enable_http_proxy", 0),  # a proxy meant for the web must not see the pool's calls
]
# Calls that have come and wait for this process to get there; beyond them gRPC answers CANCELLED.
# Its own limit is 1,000, less than what a crowd that comes at once needs.
PENDING_CALLS = [
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    *PENDING_CALLS,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
]


def connect(address: str, security: Security = PLAINTEXT) -> aio.Channel:
    """A channel to `address`; it connects on first use and again after a loss."""
    tls = security.channel_credentials()
    return open_channel(address, tls, security.token, _CHANNEL_OPTIONS, [CarryTrace()])


class Server:
    """A gRPC server with health and reflection, on one address.

    `names`: its services. `public`: clients from outside the pool may call it.

    Services are added before `start`. Health starts as NOT_SERVING, `LIVENESS` as SERVING.
    """

    def __init__(
        self, address: str, names: Sequence[str], security: Security, *, public: bool = False
    ) -> None:
        self.address = address
        tokens = security.accepted(public)
        interceptors = [TokenInterceptor(tokens)] if tokens else []
        limit = ("grpc.max_receive_message_length", port_bytes(names))
        self.grpc = aio.server(
            options=[*_SERVER_OPTIONS, limit],
            interceptors=[*interceptors, TracedCalls(), ErrorInterceptor()],
        )
        self._credentials = security.server_credentials(public)
        self._names = ("", *names)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        reflected = (*names, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, self.grpc)

    async def start(self) -> None:
        """Open the port. Raises Unavailable when it is taken."""
        await self.ready(False)
        await self.live(True)
        try:
            if self._credentials is None:
                self.grpc.add_insecure_port(self.address)
            else:
                self.grpc.add_secure_port(self.address, self._credentials)
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {self.address}: is the port taken?") from error
        await self.grpc.start()

    async def ready(self, serving: bool) -> None:
        """Tell health watchers whether this process serves."""
        status = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def live(self, going_on: bool) -> None:
        """Tell liveness probes, which ask for the service `LIVENESS`, whether work goes on."""
        status = health_pb2.HealthCheckResponse
        await self._health.set(LIVENESS, status.SERVING if going_on else status.NOT_SERVING)

    async def stop(self, grace_s: float = 0.5) -> None:
        """Refuse new calls, give open ones `grace_s`, close."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
