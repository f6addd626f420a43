"""A peer that is stopped is missed, though its host still answers for it."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tknp.cli.ports import free_ports
from tknp.client import Client, RequestFailed
from tknp.errors import TknpError
from tknp.rpc.channel import Server, connect
from tknp.rpc.security import PLAINTEXT

NOTICED_S = 30.0  # 7 s; without our own limit on pings it is more than 60 s


@pytest.mark.slow
async def test_calls_to_a_process_that_is_stopped_end() -> None:
    """One that was under way, and one that is made later; a service's and a client's."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, Path(__file__), address, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline()
        async with connect(address) as channel, Client(address) as client:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            with pytest.raises(RequestFailed, match="UNIMPLEMENTED"):
                await client.status()
            process.send_signal(signal.SIGSTOP)
            asked = client.status(timeout_s=10 * NOTICED_S)
            async with asyncio.timeout(NOTICED_S):
                ends = await asyncio.gather(watch.read(), asked, return_exceptions=True)
        assert isinstance(ends[0], aio.AioRpcError)
        assert isinstance(ends[1], TknpError)
    finally:
        process.kill()
        await process.wait()


async def serve(address: str) -> None:
    server = Server(address, [], PLAINTEXT)
    await server.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
