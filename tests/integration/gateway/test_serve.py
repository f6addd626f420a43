"""The gateway as users run it: replicas that listen themselves, and behind Ray Serve's proxies."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import httpx2
import openai
import psutil
import pytest
import pytest_asyncio
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from grpc import StatusCode, aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tknp.cli.ports import free_ports
from tknp.client import Client, Completion, RequestFailed, request_for
from tknp.errors import InvalidValue
from tknp.local import InProcessPool
from tknp.v1 import open_inference_pb2 as oi
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import ChatMessage, TokenizeRequest
from tknp.v1.inference_pb2_grpc import InferenceStub
from tknp.v1.open_inference_pb2_grpc import GRPCInferenceServiceStub

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.full,
    pytest.mark.timeout(300),
]  # fmt: skip
# What `serve run` makes of the application on a cluster with proxies.
PROXIES = """
import signal, sys
from tknp.gateway.serve_run import cluster
pool, http, grpc = sys.argv[1:]
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with cluster():
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation, gRPCOptions
    from tknp.gateway.serve_app import NAME, SERVICERS, build
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host="127.0.0.1", port=int(http)),
        grpc_options=gRPCOptions(port=int(grpc), grpc_servicer_functions=list(SERVICERS)),
    )
    serve.run(build(dict(pools=pool)), name=NAME, route_prefix="/")
    print("gateway: http://", flush=True)
    signal.sigwait([signal.SIGTERM])
"""
SERVICES = ("tknp.v1.Inference", "inference.GRPCInferenceService", "grpc.health.v1.Health")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(open_speaker: Callable[..., Any]) -> AsyncIterator[str]:
    opened = open_speaker(nodes=1)
    async with InProcessPool(opened):
        yield opened.config.coordinator


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["ports", "proxies"])
async def served(
    request: pytest.FixtureRequest, pool: str, tmp_path_factory: Any
) -> AsyncIterator[SimpleNamespace]:
    """A gateway, which has to end by SIGTERM without leaving a process or a file."""
    http, grpc = free_ports(2)
    log = tmp_path_factory.mktemp("gateway") / "log"
    command = [
        "-m", "tknp.cli.main", "gateway", "--pool-target", pool, "--http-port", str(http),
        "--grpc-port", str(grpc), "--max-replicas", "1",
    ]  # fmt: skip
    if request.param == "proxies":
        command = ["-c", PROXIES, pool, str(http), str(grpc)]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *command,
            stdout=asyncio.subprocess.PIPE, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line.startswith(b"gateway: http://"), log.read_text()
        family = psutil.Process(process.pid).children(recursive=True)
        yield SimpleNamespace(
            url=f"http://127.0.0.1:{http}", target=f"127.0.0.1:{grpc}",
            proxies=request.param == "proxies",
        )  # fmt: skip
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
        async with asyncio.timeout(60):
            while any(p.is_running() and p.status() != "zombie" for p in family):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert not [
            name for name in os.listdir("/tmp") if name.startswith(f"tknp-ray-{process.pid}-")
        ]
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(served: SimpleNamespace) -> AsyncIterator[aio.Channel]:
    async with aio.insecure_channel(served.target) as opened:
        yield opened


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def found(channel: aio.Channel) -> None:
    """Wait until the gateway knows that the pool answers.

    That one stands still from test to test, for seconds where one of another file runs alone.
    """
    stub, request = GRPCInferenceServiceStub(channel), oi.ModelReadyRequest(name="speaker")
    async with asyncio.timeout(60):
        while not (await stub.ModelReady(request)).ready:  # noqa: ASYNC110  # it is elsewhere
            await asyncio.sleep(0.1)


async def cancelled(pool: str) -> int:
    async with Client(pool) as client:
        return (await client.status()).cancelled


async def until_cancelled(pool: str, count: int) -> None:
    """Wait until `pool` says that so many requests were, long before any of these is done."""
    async with asyncio.timeout(60):
        while await cancelled(pool) < count:
            pass


async def test_http_streams_and_errors(served: SimpleNamespace, words: str, pool: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="-") as client:
        stream = await client.chat.completions.create(
            model="speaker", messages=[{"role": "user", "content": "hi"}], temperature=0,
            max_tokens=len(words.encode()), stream=True,
        )  # fmt: skip
        assert "".join([c.choices[0].delta.content or "" async for c in stream]) == words
        with pytest.raises(openai.BadRequestError, match="temperature=-1"):
            await client.completions.create(model="speaker", prompt="x", temperature=-1)
    async with httpx2.AsyncClient(base_url=served.url, timeout=60) as http:
        assert (await http.get("/health")).json() == {"status": "ok"}
        assert "<title>TKNP</title>" in (await http.get("/")).text
        named = await http.get("/version", headers={"x-request-id": "mine"})
        assert named.headers["x-request-id"] == "mine"
        body = {"model": "speaker", "prompt": "x", "max_tokens": 100_000, "stream": True}
        before = await cancelled(pool)
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
        await until_cancelled(pool, before + 1)


async def test_grpc_streams(served: SimpleNamespace, words: str) -> None:
    async with Client(served.target) as client:
        assert (await client.model()).name == "speaker"
        ids = await client.tokenize([ChatMessage(role="user", content="hi")])
        assert await client.detokenize(await client.tokenize("h\u00e9")) == "h\u00e9"
        request = request_for(ids, Sampling(max_tokens=len(words.encode())), "named")
        found = Completion(0.0)
        messages = 0
        async for response in client.generate(request):
            found.add(response, 0.0)
            messages += 1
    assert (found.text, found.request_id) == (words, "named")
    assert found.prompt_tokens == len(ids)
    assert found.finish is not None
    assert found.finish.completion_tokens == len(words.encode())
    assert messages > 3


async def test_grpc_errors_have_details(channel: aio.Channel) -> None:
    stub = InferenceStub(channel)
    call = stub.Generate(request_for("x", Sampling(temperature=-1)))
    with pytest.raises(aio.AioRpcError) as raised:
        [response async for response in call]
    elsewhere = (("x-tknp-model", "absent"),)
    with pytest.raises(aio.AioRpcError) as unary:
        await stub.Tokenize(TokenizeRequest(text="x"), metadata=elsewhere)
    assert unary.value.code() == StatusCode.NOT_FOUND
    error = raised.value
    assert error.code() == StatusCode.INVALID_ARGUMENT
    assert "temperature=-1" in (error.details() or "")
    trailer = dict(error.trailing_metadata())["grpc-status-details-bin"]
    status = Status.FromString(trailer if isinstance(trailer, bytes) else trailer.encode())
    bad = BadRequest()
    assert status.details[0].Unpack(bad)
    assert bad.field_violations[0].field == "temperature"


async def test_a_call_that_ends_early_ends_its_request(served: SimpleNamespace, pool: str) -> None:
    """By cancellation, and by its deadline."""
    if served.proxies:
        pytest.skip(
            "Serve's gRPC proxy cancels a replica's call only while it waits for the next message"
        )
    long = request_for("x", Sampling(max_tokens=100_000))
    before = await cancelled(pool)
    async with Client(served.target) as client:
        stream = client.generate(long)
        for _ in range(3):
            await anext(stream)
        await stream.aclose()
        await until_cancelled(pool, before + 1)
        with pytest.raises(RequestFailed, match="DEADLINE_EXCEEDED"):
            [response async for response in client.generate(long, timeout_s=3)]
        await until_cancelled(pool, before + 2)


async def test_a_request_ends_by_its_own_timeout(served: SimpleNamespace, pool: str) -> None:
    """At its pool, whatever stands between and whether its client is still there or not."""
    long = request_for("x", Sampling(max_tokens=100_000))
    long.timeout_s = 2
    async with Client(served.target) as client, Client(pool) as behind:
        with pytest.raises(RequestFailed, match="DEADLINE_EXCEEDED"):
            [response async for response in client.generate(long)]
        stream = client.generate(long)
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(60):
            while (status := await behind.status()).running or status.prefilling or status.queued:
                pass


async def test_health_and_reflection(channel: aio.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == serving
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await anext(aiter(watch))).status == serving
    watch.cancel()
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    async for answer in reflection.ServerReflectionInfo(iter([ask])):
        found = {service.name for service in answer.list_services_response.service}
        assert found >= set(SERVICES)


async def test_the_open_inference_protocol(channel: aio.Channel, words: str) -> None:
    stub = GRPCInferenceServiceStub(channel)
    assert (await stub.ServerLive(oi.ServerLiveRequest())).live
    assert (await stub.ServerReady(oi.ServerReadyRequest())).ready
    assert (await stub.ModelReady(oi.ModelReadyRequest(name="speaker"))).ready
    assert not (await stub.ModelReady(oi.ModelReadyRequest(name="absent"))).ready
    request = oi.ModelInferRequest(model_name="speaker", id="mine")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.inputs[0].contents.bytes_contents.append(b"x")
    request.parameters["max_tokens"].int64_param = len(words.encode())
    found = await stub.ModelInfer(request)
    assert found.id == "mine"
    assert found.outputs[0].contents.bytes_contents == [words.encode()]
    raw = oi.ModelInferRequest(model_name="speaker", parameters=request.parameters)
    raw.inputs.add(name="token_ids", datatype="UINT32", shape=[1])
    raw.raw_input_contents.append(struct.pack("<I", ord("x")))
    raw.outputs.add(name="text_output")
    said = words.encode()
    (content,) = (await stub.ModelInfer(raw)).raw_output_contents
    assert content == struct.pack("<I", len(said)) + said
    request.parameters["temperature"].int64_param = -1
    with pytest.raises(aio.AioRpcError) as raised:
        await stub.ModelInfer(request)
    assert raised.value.code() == StatusCode.INVALID_ARGUMENT


async def test_tls_is_refused_where_it_has_no_effect() -> None:
    from tknp.gateway.serve_app import build

    files = {"keys_file": "keys", "http_cert": "cert", "http_key": "key"}
    with pytest.raises(InvalidValue, match="http_options") as raised:
        build({"pools": "127.0.0.1:50051", "http_host": "0.0.0.0", **files})
    assert raised.value.field == "http_cert"
