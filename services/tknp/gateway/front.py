"""What one replica serves on the gateway's ports by itself, without a proxy before it.

    client -- HTTP/1.1, TLS --> queue of the shared socket --> uvicorn --> `http`
    client -- gRPC, TLS ------> a listener of each replica --> `grpc_server`

A chunk passes one process between pool and client. Leaving lets what runs end: new connections go
to other replicas, idle ones are closed, and calls of both kinds are waited for, except those
that watch its health: they are told and ended. Serve ends the process of a replica that is not done
within `timeout_s`.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import uvicorn
from fastapi import FastAPI
from grpc import aio

from tknp.errors import Unavailable
from tknp.gateway.gateway import Gateway
from tknp.gateway.generation import UNREAD_S
from tknp.gateway.grpc_server import add_services
from tknp.gateway.ports import take_http
from tknp.gateway.settings import GatewaySettings
from tknp.rpc.channel import PENDING_CALLS
from tknp.rpc.pem import read_ca, read_pair

_KEEP_ALIVE_S = 75  # most clients and balancers keep connections for less: it is they who close


class _Server(uvicorn.Server):
    """Leaves the signals of this process to Ray."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def front(gateway: Gateway, app: FastAPI, path: str) -> AsyncIterator[None]:
    """Serve `app` and gRPC while the context lasts; on leaving, until the last call has ended.

    `path`: of the `Ports` of this gateway. Raises InvalidValue for TLS files that can't be used.
    """
    settings = gateway.settings
    http = _Server(_http_config(settings, app))
    serving = asyncio.create_task(http.serve(sockets=[take_http(path)]))
    calls: aio.Server | None = None
    try:
        while not http.started and not serving.done():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        if serving.done():
            await serving
            raise Unavailable("the HTTP server of this replica has ended as it began")
        if settings.grpc_port:
            calls = await _start_grpc(gateway)
        yield
    finally:
        gateway.leaving = True
        http.should_exit = True
        ends: list[Any] = [serving]
        if calls is not None:
            ends.append(calls.stop(settings.timeout_s + UNREAD_S))
        await asyncio.gather(*ends)


def _http_config(settings: GatewaySettings, app: FastAPI) -> uvicorn.Config:
    tls: dict[str, Any] = {}
    if settings.http_cert is not None:
        tls = {"ssl_certfile": settings.http_cert, "ssl_keyfile": settings.http_key}
    if settings.http_client_ca is not None:
        tls |= {"ssl_ca_certs": settings.http_client_ca, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return uvicorn.Config(
        app, lifespan="off", ws="none", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S, **tls,
    )  # fmt: skip


def check_tls(settings: GatewaySettings) -> None:
    """Raise InvalidValue for files of TLS that can't be used, before anything is started."""
    _credentials(settings)


def _credentials(settings: GatewaySettings) -> grpc.ServerCredentials | None:
    if settings.http_cert is None or settings.http_key is None:
        return None
    cert, key = read_pair(settings.http_cert, settings.http_key, "http")
    ca = settings.http_client_ca and read_ca("http_client_ca", settings.http_client_ca)
    return grpc.ssl_server_credentials([(key, cert)], ca or None, require_client_auth=bool(ca))


async def _start_grpc(gateway: Gateway) -> aio.Server:
    settings = gateway.settings
    host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
    address = f"{host}:{settings.grpc_port}"
    server = aio.server(
        options=(
            *PENDING_CALLS,
            ("grpc.so_reuseport", 1),
            ("grpc.max_receive_message_length", settings.max_body_bytes),
        )
    )
    add_services(server, gateway)
    credentials = _credentials(settings)
    if credentials is None:
        server.add_insecure_port(address)
    else:
        server.add_secure_port(address, credentials)
    await server.start()
    return server
