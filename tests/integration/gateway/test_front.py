"""What replicas serve on the ports that they share: TLS, HTTP, gRPC, and one that takes over."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
import pytest_asyncio
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tknp.cli.ports import free_ports
from tknp.client import Client, request_for
from tknp.errors import InvalidValue, Unavailable
from tknp.gateway.front import front
from tknp.gateway.gateway import Gateway
from tknp.gateway.http import create_app
from tknp.gateway.ports import Ports
from tknp.gateway.settings import GatewaySettings
from tknp.local import InProcessPool
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2_grpc import InferenceStub

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(300)]
LOOPBACK = "127.0.0.1"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(open_speaker: Callable[..., Any]) -> AsyncIterator[str]:
    opened = open_speaker(nodes=1)
    async with InProcessPool(opened):
        yield opened.config.coordinator


@asynccontextmanager
async def replica(settings: GatewaySettings, path: str) -> AsyncIterator[Gateway]:
    """One replica on the ports of `path`; leaving waits for what runs there."""
    gateway = Gateway(settings)
    app = create_app(gateway, around=partial(front, gateway, path=path))
    async with app.router.lifespan_context(app):
        yield gateway


def ports_of(settings: GatewaySettings, directory: Path) -> Ports:
    return Ports(settings.http_host, settings.http_port, settings.grpc_port, directory)


async def test_tls_on_both_ports(pool: str, secured: dict[str, str], tmp_path: Path) -> None:
    """With a CA for clients, nobody gets in without a certificate of it."""

    def pem(name: str) -> bytes:
        return Path(secured[name]).read_bytes()

    http_port, grpc_port = free_ports(2)
    settings = GatewaySettings(
        pools=(pool,), http_port=http_port, grpc_port=grpc_port, http_cert=secured["tls_cert"],
        http_key=secured["tls_key"], http_client_ca=secured["tls_ca"],
    )  # fmt: skip
    trusting = ssl.create_default_context(cafile=secured["tls_ca"])
    known = ssl.create_default_context(cafile=secured["tls_ca"])
    known.load_cert_chain(secured["tls_cert"], secured["tls_key"])
    shown = grpc.ssl_channel_credentials(*map(pem, ("tls_ca", "tls_key", "tls_cert")))
    url, target = f"https://{LOOPBACK}:{http_port}/v1/models", f"{LOOPBACK}:{grpc_port}"
    with ports_of(settings, tmp_path) as ports:
        async with replica(settings, ports.path):
            async with httpx2.AsyncClient(verify=known, timeout=60) as http:
                assert (await http.get(url)).json()["data"][0]["id"] == "speaker"
            async with httpx2.AsyncClient(verify=trusting, timeout=60) as http:
                with pytest.raises(httpx2.TransportError):
                    await http.get(url)
            with pytest.raises(Unavailable):
                async with Client(target, secured["tls_ca"]) as client:
                    await client.model()
            async with aio.secure_channel(target, shown) as channel:
                call = InferenceStub(channel).Generate(
                    request_for("x", Sampling(max_tokens=4)), timeout=60
                )
                assert "".join([response.text async for response in call]) == "Wave"


async def test_a_replica_takes_over(pool: str, words: str, tmp_path: Path) -> None:
    """A stream of the one that goes ends where it began; who comes meanwhile is not refused."""
    http_port, grpc_port = free_ports(2)
    settings = GatewaySettings(pools=(pool,), http_port=http_port, grpc_port=grpc_port)
    asked = {"model": "speaker", "prompt": "x", "temperature": 0, "stream": True}
    with ports_of(settings, tmp_path) as ports:
        async with AsyncExitStack() as held:
            old = AsyncExitStack()
            first = await old.enter_async_context(replica(settings, ports.path))
            http = await held.enter_async_context(
                httpx2.AsyncClient(base_url=f"http://{LOOPBACK}:{http_port}", timeout=60)
            )
            body = {**asked, "max_tokens": 4 * len(words.encode()), "n": 2}
            response = await held.enter_async_context(
                http.stream("POST", "/v1/completions", json=body)
            )
            lines = response.aiter_lines()
            seen = [await anext(lines)]
            leaving = asyncio.create_task(old.aclose())
            late = asyncio.create_task(http.get("/version"))  # waits in the queue, or is answered
            second = await held.enter_async_context(replica(settings, ports.path))
            assert (await late).status_code == 200
            seen += [line async for line in lines]
            await leaving
            assert first.inflight == 0
            text = ["", ""]
            for line in seen:
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        text[choice["index"]] += choice["text"]
            assert text == [words * 4] * 2
            async with Client(f"{LOOPBACK}:{grpc_port}") as client:
                assert (await client.model()).name == "speaker"
                assert second.ready


async def test_health_is_watched(pool: str, tmp_path: Path) -> None:
    """A replica that goes says so and ends the call, which would keep it there."""
    http_port, grpc_port = free_ports(2)
    settings = GatewaySettings(pools=(pool,), http_port=http_port, grpc_port=grpc_port)
    answer = health_pb2.HealthCheckResponse
    with ports_of(settings, tmp_path) as ports:
        async with (
            AsyncExitStack() as stack,
            aio.insecure_channel(f"{LOOPBACK}:{grpc_port}") as channel,
        ):
            await stack.enter_async_context(replica(settings, ports.path))
            call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            watch = aiter(call)
            assert (await anext(watch)).status == answer.SERVING
            async with asyncio.timeout(60):
                await stack.aclose()
                assert [told.status async for told in watch] == [answer.NOT_SERVING]


async def test_a_call_that_nobody_reads_keeps_no_place(
    pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    until: Callable[[Callable[[], bool]], Awaitable[None]],
) -> None:  # fmt: skip
    monkeypatch.setattr("tknp.gateway.grpc_server.UNREAD_S", 0.1)
    http_port, grpc_port = free_ports(2)
    settings = GatewaySettings(pools=(pool,), http_port=http_port, grpc_port=grpc_port)
    request = request_for("x", Sampling(max_tokens=100_000, logprobs=20))
    request.timeout_s = 3
    with ports_of(settings, tmp_path) as ports:
        few = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024))
        async with (
            replica(settings, ports.path) as gateway,
            aio.insecure_channel(f"{LOOPBACK}:{grpc_port}", options=few) as channel,
        ):
            call = InferenceStub(channel).Generate(request)
            answers = aiter(call)
            assert (await anext(answers)).HasField("accepted")
            await until(lambda: not gateway.inflight)
            with pytest.raises(aio.AioRpcError) as raised:
                [response async for response in answers]
            assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert "had not been read" in (raised.value.details() or "")


async def test_a_port_is_nobody_elses(tmp_path: Path) -> None:
    http_port, grpc_port = free_ports(2)
    (tmp_path / "second").mkdir()
    with Ports(LOOPBACK, http_port, grpc_port, tmp_path):
        for field, taken in (
            ("http_port", (http_port, 0)),
            ("grpc_port", (*free_ports(1), grpc_port)),
        ):
            with pytest.raises(InvalidValue) as raised:
                Ports(LOOPBACK, *taken, tmp_path / "second")
            assert raised.value.field == field
