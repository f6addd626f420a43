"""`tknp-load echo`: a server with known timing, to see what the client itself can do."""

from __future__ import annotations

import asyncio
import json
import signal

import click

from tknp_loadgen import loops
from tknp_loadgen.echo.grpc_server import GrpcEcho
from tknp_loadgen.echo.http import HttpEcho
from tknp_loadgen.echo.script import steady


async def _serve(http_port: int, grpc_port: int, ttft_s: float, itl_s: float, size: int) -> None:
    plan = steady(ttft_s, itl_s, size)
    http, rpc = HttpEcho(plan), GrpcEcho(plan)
    ports = {"http": await http.start(http_port), "grpc": await rpc.start(grpc_port)}
    click.echo(json.dumps({name: f"127.0.0.1:{port}" for name, port in ports.items()}))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    for echo in (http, rpc):
        spread_ns = max(echo.seen.received_ns, default=0) - min(echo.seen.received_ns, default=0)
        click.echo(json.dumps({
            "requests": echo.seen.requests, "connections": echo.seen.connections,
            "most_open": echo.seen.most_open, "received_spread_ms": spread_ns / 1e6,
        }))  # fmt: skip
        await echo.stop()


@click.command("echo")
@click.option("--http-port", type=int, default=0, help="0: any free one.")
@click.option("--grpc-port", type=int, default=0, help="0: any free one.")
@click.option("--ttft-ms", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--itl-ms", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--tokens-per-chunk", type=click.IntRange(min=1), default=1, show_default=True)
def command(
    http_port: int, grpc_port: int, ttft_ms: float, itl_ms: float, tokens_per_chunk: int
) -> None:
    """Serve both APIs on loopback, with answers of known timing, until Ctrl-C.

    Prints its addresses as one line of JSON, and at the end what it saw.
    """
    loops.run(_serve(http_port, grpc_port, ttft_ms / 1e3, itl_ms / 1e3, tokens_per_chunk))
