"""Whole pools: TLS and tokens between all services, and what logs say of a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from tknp.client import Client, Prompt, RequestFailed, request_for
from tknp.errors import TknpError
from tknp.local import InProcessPool
from tknp.rpc.channel import connect
from tknp.rpc.ids import unpack_ids
from tknp.rpc.pem import read_token
from tknp.rpc.security import read_security
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import DescribeRequest, Sampling
from tknp.v1.inference_pb2 import ChatMessage

SETTINGS: dict[str, Any] = {
    "page_size": 16, "kv_memory_bytes": "256KiB", "kv_transfer": "grpc", "max_model_len": 256,
}  # fmt: skip
SECRET = "the passphrase is xyzzy-plugh-42"


async def generate(client: Client, prompt: Prompt, **sampling: Any) -> list[int]:
    ids: list[int] = []
    request = request_for(prompt, Sampling(ignore_eos=True, **sampling))
    async for response in client.generate(request, timeout_s=60):
        ids += unpack_ids("token_ids", response.token_ids)
    return ids


@pytest.mark.parametrize("tls", [True, False])
async def test_a_secured_pool_generates_what_an_open_one_does(
    tls: bool,
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    secured: dict[str, str],
) -> None:
    path = random_checkpoint()
    given = secured if tls else {k: v for k, v in secured.items() if k.endswith("token_file")}
    shape = {"nodes": 2, "tp": 2, "prefill_tp": 2, **SETTINGS}
    opened, closed = make_pool(path, **shape), make_pool(path, **shape, **given)
    async with InProcessPool(opened), Client(opened.config.coordinator) as client:
        expected = await generate(client, SECRET, max_tokens=20)
    target, ca = closed.config.coordinator, given.get("tls_ca")
    token = read_token("api_token_file", given["api_token_file"])
    async with InProcessPool(closed):
        async with Client(target, ca, token) as client:
            assert await generate(client, SECRET, max_tokens=20) == expected
            assert (await client.status()).completed == 1
        for wrong in (None, token[:-1]):
            async with Client(target, ca, wrong) as client:
                with pytest.raises(RequestFailed, match="UNAUTHENTICATED"):
                    await generate(client, SECRET, max_tokens=20)
        owner = closed.config.nodes[1].addresses[1]
        async with connect(owner) as channel:
            with pytest.raises(aio.AioRpcError, match=r"UNAVAILABLE|no token was given"):
                await AttentionOwnerStub(channel).Describe(DescribeRequest(), timeout=10)
        async with connect(owner, read_security(closed.config)) as channel:
            await AttentionOwnerStub(channel).Describe(DescribeRequest(), timeout=10)


async def test_a_pool_says_that_tokens_differ(
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    secured: dict[str, str],
    tmp_path: Path,
) -> None:
    """A service that was started with another token is named, and nothing hangs."""
    other = tmp_path / "token"
    other.write_text("another-0123456789abcdef")
    pool = make_pool(random_checkpoint(), token_file=secured["token_file"], **SETTINGS)
    running = InProcessPool(pool)
    peer = running.coordinator.driver.peers.prefill[0][0]
    await peer.channel.close(None)
    peer.channel = connect(peer.address, read_security(replace(pool.config, token_file=str(other))))
    with pytest.raises(TknpError, match="UNAUTHENTICATED: the token is wrong"):
        async with running:
            pass


@pytest.mark.parametrize("chat", [False, True])
async def test_no_log_and_no_error_carries_a_prompt(
    chat: bool,
    make_pool: Callable[..., Any],
    random_checkpoint: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool(random_checkpoint(), prefill_tp=2, **SETTINGS)
    prompt = [101, 102, 103, 104, 105]
    refused: list[TknpError] = []
    with caplog.at_level(logging.DEBUG):
        async with InProcessPool(pool), Client(pool.config.coordinator) as client:
            model = await client.model()
            asked = [ChatMessage(role="user", content=SECRET)] if chat else SECRET
            answer = await generate(client, asked, max_tokens=8)
            await generate(client, prompt, max_tokens=8, repetition_penalty=1.5)
            for wrong in (SECRET * 99, [*prompt, model.vocab_size], [*prompt, *range(250)] * 9):
                with pytest.raises(TknpError) as error:
                    await generate(client, wrong, max_tokens=8)
                refused.append(error.value)
            with pytest.raises(TknpError) as error:
                await generate(client, SECRET, max_tokens=8, temperature=-1)
            refused.append(error.value)
    ids = [", ".join(map(str, found)) for found in (prompt, answer, SECRET.encode())]
    assert "grpc" in caplog.text  # the loggers of others are among those looked at
    for text in (caplog.text, *map(str, refused)):
        for part in ("passphrase", "xyzzy", *ids):
            assert part not in text
    assert all("INVALID_ARGUMENT" in str(error) for error in refused)
