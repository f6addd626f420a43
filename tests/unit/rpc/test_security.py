"""One port at a time: who gets in, who doesn't, and what they learn."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tknp.cli.main import main
from tknp.cli.ports import free_ports
from tknp.client import Client, RequestFailed
from tknp.config import PoolConfig, pool_from
from tknp.errors import InvalidValue, Unavailable
from tknp.rpc.channel import Server, connect
from tknp.rpc.pem import read_ca, read_pair, read_token
from tknp.rpc.security import PLAINTEXT, Security, Tls, read_security
from tknp.v1 import attention_owner_pb2 as owner_pb
from tknp.v1 import (
    attention_owner_pb2_grpc,
    coordinator_pb2,
    coordinator_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
)
from tknp.v1.step_pb2 import Step, StepResult

NAMES = ("tknp.v1.Coordinator", "tknp.v1.Inference", "tknp.v1.AttentionOwner")
TOKEN, API_TOKEN = "services-0123456789abcdef", "clients-0123456789abcdef"


class Port(
    coordinator_pb2_grpc.CoordinatorServicer,
    inference_pb2_grpc.InferenceServicer,
    attention_owner_pb2_grpc.AttentionOwnerServicer,
):
    """One method of each kind; `read` counts the messages that reached them."""

    def __init__(self) -> None:
        self.read = 0

    async def GetStatus(self, request: Any, context: Any) -> coordinator_pb2.Status:
        self.read += 1
        return coordinator_pb2.Status(model="tiny")

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.read += 1
        yield inference_pb2.GenerateResponse(text=f"{len(request.text)}")

    async def Write(self, chunks: AsyncIterator[Any], context: Any) -> owner_pb.WriteResponse:
        sizes = [len(chunk.data) async for chunk in chunks]
        self.read += len(sizes)
        return owner_pb.WriteResponse(bytes=sum(sizes))

    async def Run(self, steps: AsyncIterator[Any], context: Any) -> AsyncIterator[StepResult]:
        async for step in steps:
            self.read += 1
            yield StepResult(step=step.step)


@asynccontextmanager
async def serving(security: Security, public: bool = False) -> AsyncIterator[tuple[str, Port]]:
    address, port = f"127.0.0.1:{free_ports(1)[0]}", Port()
    server = Server(address, NAMES, security, public=public)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(port, server.grpc)
    inference_pb2_grpc.add_InferenceServicer_to_server(port, server.grpc)
    attention_owner_pb2_grpc.add_AttentionOwnerServicer_to_server(port, server.grpc)
    await server.start()
    await server.ready(True)
    try:
        yield address, port
    finally:
        await server.stop(0)


async def status(channel: aio.Channel) -> str:
    call = coordinator_pb2_grpc.CoordinatorStub(channel).GetStatus
    return (await call(coordinator_pb2.GetStatusRequest(), timeout=10)).model


async def generate(channel: aio.Channel) -> str:
    stub = inference_pb2_grpc.InferenceStub(channel)
    messages = stub.Generate(inference_pb2.GenerateRequest(text="abc"), timeout=10)
    return "".join([message.text async for message in messages])


async def write(channel: aio.Channel) -> int:
    call = attention_owner_pb2_grpc.AttentionOwnerStub(channel).Write(None, timeout=10)
    for _ in range(3):
        await call.write(owner_pb.KvChunk(data=b"xy"))
    await call.done_writing()
    return int((await call).bytes)


async def run(channel: aio.Channel) -> list[int]:
    async def steps() -> AsyncIterator[Step]:
        for number in range(3):
            yield Step(step=number)

    results = attention_owner_pb2_grpc.AttentionOwnerStub(channel).Run(steps(), timeout=10)
    return [result.step async for result in results]


CALLS: list[tuple[Callable[[aio.Channel], Any], Any]] = [
    (status, "tiny"), (generate, "3"), (write, 6), (run, [0, 1, 2]),
]  # fmt: skip


def pool_with(**settings: object) -> PoolConfig:
    return pool_from({
        "model": "m", "coordinator": "127.0.0.1:1", "data_plane": "127.0.0.1:2",
        "nodes": [{"addresses": ["127.0.0.1:3"]}], "prefill": [{"addresses": ["127.0.0.1:4"]}],
        **settings,
    })  # fmt: skip


@pytest.fixture
def tls(secured: dict[str, str]) -> Tls:
    found = read_security(pool_with(**secured)).tls
    assert found is not None
    return found


# --- tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize(("call", "answer"), CALLS)
async def test_every_kind_of_call_shows_the_token(
    call: Callable[[aio.Channel], Any], answer: object, encrypted: bool, tls: Tls
) -> None:
    security = Security(tls if encrypted else None, TOKEN)
    async with serving(security) as (address, _), connect(address, security) as channel:
        assert await call(channel) == answer


@pytest.mark.parametrize("shown", [None, "services-0123456789abcdeF", TOKEN + "0", TOKEN[:-1], " "])
@pytest.mark.parametrize("call", [call for call, _ in CALLS])
async def test_a_call_without_the_token_ends_unread_and_says_so(
    call: Callable[[aio.Channel], Any], shown: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        async with (
            serving(Security(token=TOKEN)) as (address, port),
            connect(address, Security(token=shown)) as channel,
        ):
            with pytest.raises((aio.AioRpcError, asyncio.InvalidStateError)) as refusal:
                await call(channel)
    assert port.read == 0
    why = "no token was given" if shown is None else "the token is wrong"
    if call in (status, generate):  # gRPC hides from who still writes why the stream is over
        assert isinstance(refusal.value, aio.AioRpcError)
        assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert refusal.value.details() == f"{why}: send this pool's bearer token"
    assert any(
        record.name == "tknp.rpc.bearer" and record.getMessage().endswith(why)
        for record in caplog.records
    )
    assert TOKEN not in caplog.text
    assert shown is None or shown == " " or shown not in caplog.text


async def test_two_tokens_in_one_call_are_refused() -> None:
    security = Security(token=TOKEN)
    async with serving(security) as (address, _), connect(address) as channel:
        pair = ("authorization", f"Bearer {TOKEN}")
        call = coordinator_pb2_grpc.CoordinatorStub(channel).GetStatus
        assert (await call(coordinator_pb2.GetStatusRequest(), metadata=(pair,))).model == "tiny"
        with pytest.raises(aio.AioRpcError, match="the token is wrong"):
            await call(coordinator_pb2.GetStatusRequest(), metadata=(pair, pair))


async def test_a_public_port_takes_either_token_an_internal_one_does_not() -> None:
    security = Security(token=TOKEN, api_token=API_TOKEN)
    async with serving(security, public=True) as (address, _):
        for token in (TOKEN, API_TOKEN):
            async with Client(address, token=token) as client:
                assert (await client.status()).model == "tiny"
    async with serving(security) as (address, _), Client(address, token=API_TOKEN) as client:
        with pytest.raises(RequestFailed, match="UNAUTHENTICATED: the token is wrong"):
            await client.status()


async def test_probes_need_no_token_and_reflection_does() -> None:
    security = Security(token=TOKEN)
    async with serving(security) as (address, _), connect(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=NAMES[0]))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(aio.AioRpcError, match="no token was given"):
            await reflected(channel)
        async with connect(address, security) as inside:
            assert set(NAMES) < set(await reflected(inside))


async def reflected(channel: aio.Channel) -> list[str]:
    async def requests() -> AsyncIterator[Any]:
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return [
        service.name
        async for response in stub.ServerReflectionInfo(requests(), timeout=10)
        for service in response.list_services_response.service
    ]


@pytest.mark.parametrize("encrypted", [False, True])
async def test_commands_show_the_token_of_a_file(
    encrypted: bool, tls: Tls, secured: dict[str, str]
) -> None:
    """In a thread of its own, as a command starts its own event loop."""
    security = Security(tls if encrypted else None, TOKEN, API_TOKEN)
    async with serving(security, public=True) as (address, _):
        ask = partial(CliRunner().invoke, main)
        flags = ["--tls-ca", secured["tls_ca"]] if encrypted else []
        with_flags = ["status", "--target", address, *flags, "--json"]
        variable = {"TKNP_TOKEN_FILE": secured["api_token_file"]}
        answer = await asyncio.to_thread(ask, with_flags, env=variable)
        assert answer.exit_code == 0, answer.output
        assert json.loads(answer.stdout)["model"] == "tiny"
        refusal = await asyncio.to_thread(ask, with_flags, env={"TKNP_TOKEN_FILE": None})
        assert refusal.exit_code == 1
        assert "UNAUTHENTICATED: no token was given" in " ".join(refusal.stderr.split())


# --- TLS ---------------------------------------------------------------------------------------


async def test_an_internal_port_wants_a_certificate_and_a_public_one_does_not(
    tls: Tls, secured: dict[str, str]
) -> None:
    security = Security(tls, TOKEN)
    for public in (False, True):
        async with serving(security, public=public) as (address, port):
            async with Client(address, secured["tls_ca"], TOKEN) as client:
                if public:
                    assert (await client.status()).model == "tiny"
                else:
                    with pytest.raises(Unavailable):
                        await client.status()
            assert port.read == public


async def test_strangers_get_no_further_than_the_handshake(
    tls: Tls, secured: dict[str, str]
) -> None:
    beside = Path(secured["tls_ca"]).parent
    pair = read_pair(str(beside / "stranger.pem"), str(beside / "stranger.key"))
    stranger = Tls(*pair, tls.ca)
    async with serving(Security(tls, TOKEN)) as (address, port):
        for tried in (Security(stranger, TOKEN), Security(None, TOKEN)):
            async with connect(address, tried) as channel:
                with pytest.raises(aio.AioRpcError) as error:
                    await status(channel)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert port.read == 0


async def test_a_server_that_the_ca_did_not_sign_gets_no_token(
    tls: Tls, secured: dict[str, str]
) -> None:
    beside = Path(secured["tls_ca"]).parent
    pair = read_pair(str(beside / "stranger.pem"), str(beside / "stranger.key"))
    impostor = Security(Tls(*pair, tls.ca))
    async with serving(impostor, public=True) as (address, port):
        async with Client(address, secured["tls_ca"], TOKEN) as client:
            with pytest.raises(Unavailable):
                await client.status()
        assert port.read == 0


def test_a_client_sends_no_token_in_clear_text_beyond_loopback() -> None:
    with pytest.raises(InvalidValue, match="over TLS only: give tls_ca"):
        Client("gateway.pool:443", token=TOKEN)


# --- files -------------------------------------------------------------------------------------


def test_secrets_are_read_and_never_shown(secured: dict[str, str]) -> None:
    config = pool_with(**secured)
    security = read_security(config)
    assert (security.token, security.api_token) == (TOKEN, API_TOKEN)
    key = Path(secured["tls_key"]).read_text().splitlines()[1]
    for text in (repr(security), str(security), repr(security.tls), repr(config)):
        assert TOKEN not in text
        assert API_TOKEN not in text
        assert key not in text
    assert read_security(pool_with()) == PLAINTEXT


@pytest.mark.parametrize(
    "content", [b"", b"short", b"two words that are long", b"\xff" * 20, b"0123456789abcdef\n0"]
)
def test_a_weak_or_odd_token_is_refused_unseen(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(InvalidValue, match="openssl rand -hex 32") as error:
        read_token("token_file", str(path))
    assert error.value.field == "token_file"
    text = content.decode(errors="replace")
    assert not text or text not in str(error.value)


def test_certificates_that_do_not_fit_are_refused(secured: dict[str, str], tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\0\xff")
    stranger = str(Path(secured["tls_ca"]).with_name("stranger.key"))
    for key in (stranger, str(garbage)):
        with pytest.raises(InvalidValue, match=r"tls_key=.*key of the certificate in"):
            read_pair(secured["tls_cert"], key)
    for wrong in (garbage, secured["token_file"]):
        with pytest.raises(InvalidValue, match=r"tls_ca=.*PEM certificates"):
            read_ca("tls_ca", str(wrong))
    with pytest.raises(InvalidValue, match=r"tls_ca=.*cannot be read: No such file"):
        read_ca("tls_ca", str(tmp_path / "absent"))


# --- sizes and garbage -------------------------------------------------------------------------


async def test_a_message_that_is_too_large_is_refused_and_the_port_serves_on() -> None:
    async with serving(PLAINTEXT) as (address, port), connect(address) as channel:
        raw = channel.unary_unary("/tknp.v1.Coordinator/GetStatus")
        with pytest.raises(aio.AioRpcError, match="at most 1048576 bytes, not 1048577") as error:
            await raw(bytes(2**20 + 1))
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(aio.AioRpcError, match="larger than max") as error:
            await raw(bytes(2**26 + 1))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(aio.AioRpcError, match="at most 8388608 bytes"):
            await stub.Generate(inference_pb2.GenerateRequest(text="a" * 2**23)).read()
        assert port.read == 0
        largest = await stub.Generate(inference_pb2.GenerateRequest(text="a" * (2**23 - 99))).read()
        assert largest.text == str(2**23 - 99)


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\xff", bytes(range(256))])
@pytest.mark.parametrize("method", ["Coordinator/GetStatus", "AttentionOwner/Write"])
async def test_bytes_that_are_no_message_are_refused(method: str, body: bytes) -> None:
    async with serving(PLAINTEXT) as (address, port), connect(address) as channel:

        async def bodies() -> AsyncIterator[bytes]:
            yield body

        path = f"/tknp.v1.{method}"
        streams = method.endswith("Write")
        call = channel.stream_unary(path)(bodies()) if streams else channel.unary_unary(path)(body)
        with pytest.raises(aio.AioRpcError, match="are not a request of") as error:
            await call
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert port.read == 0
        assert await status(channel) == "tiny"
