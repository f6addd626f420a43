"""A gateway beside a pool on this machine: what `tknp up --gateway` adds."""

from __future__ import annotations

import asyncio
import http.client
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
from rich.console import Console

from tknp.cli.local_pool import LOOPBACK, RunningPool
from tknp.cli.ports import check_free, free_ports
from tknp.cli.processes import Command
from tknp.cli.serve import inherited_environment

_START_S = 180.0
_LOOK_S = 0.2


@dataclass(frozen=True)
class GatewayPorts:
    """Where the gateway listens. `http` 0: any free one; `grpc` 0: nowhere."""

    http: int
    grpc: int


def gateway_beside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Options of a gateway, handed on as `gateway`: its ports, or None without one."""

    @click.option("--gateway/--no-gateway", default=False, show_default=True,
                  help="Start OpenAI HTTP and the page beside the pool. Off by default: Ray's "
                       "processes share the pool's cores even while nobody asks.")  # fmt: skip
    @click.option("--http-port", type=click.IntRange(0, 65535), default=8000, show_default=True,
                  help="Of the gateway; 0: any free one.")  # fmt: skip
    @click.option("--grpc-port", type=click.IntRange(0, 65535), default=0, show_default=True,
                  help="Of the gateway; 0: off. The coordinator speaks gRPC, too.")  # fmt: skip
    @wraps(function)
    def command(*, gateway: bool, http_port: int, grpc_port: int, **values: Any) -> Any:
        ports = GatewayPorts(http_port, grpc_port) if gateway else None
        return function(gateway=ports, **values)

    return command


async def start_gateway(pool: RunningPool, ports: GatewayPorts, console: Console) -> str:
    """Start it under the pool's supervisor; returns its URL once it answers.

    Raises InvalidValue where a port is taken, and what `Supervisor.guard` does.
    """
    port = check_free("http_port", LOOPBACK, ports.http) if ports.http else free_ports(1)[0]
    argv = [
        sys.executable, "-m", "tknp.cli.main", "gateway", "--pool-target", pool.target,
        "--http-port", str(port), "--grpc-port", str(ports.grpc),
        "--log-file", str(pool.directory / "logs" / "gateway-requests.log"),
        "--drain-s", "0",  # its pool goes at the same time
    ]  # fmt: skip
    for flag, value in (
        ("--tls-ca", pool.pool.tls_ca),
        ("--token-file", pool.pool.api_token_file or pool.pool.token_file),
    ):
        argv += [flag, value] if value else []
    argv += ["--insecure"] if pool.pool.insecure else []
    await pool.supervisor.start(Command("gateway", argv, inherited_environment()))
    with console.status("starting the gateway"):
        await pool.supervisor.guard(asyncio.wait_for(_answers(port), _START_S))
    return f"http://{LOOPBACK}:{port}"


async def _answers(port: int) -> None:
    while not await asyncio.to_thread(_healthy, port):  # noqa: ASYNC110 - of another process
        await asyncio.sleep(_LOOK_S)


def _healthy(port: int) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=5)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()
