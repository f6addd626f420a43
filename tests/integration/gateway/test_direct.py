"""The coordinator's own port: the client that waits, and what errors say beside their status."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
import pytest_asyncio
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode, aio

from tknp.client import BlockingClient, Client, Completion, request_for
from tknp.local import InProcessPool
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import ChatMessage
from tknp.v1.inference_pb2_grpc import InferenceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(open_speaker: Callable[..., Any]) -> AsyncIterator[str]:
    pool = open_speaker(nodes=1, max_batch=1, max_queue=1)
    async with InProcessPool(pool):
        yield pool.config.coordinator


async def test_the_client_that_waits(target: str, words: str) -> None:
    def use() -> None:
        with BlockingClient(target) as client:
            assert client.model().name == "speaker"
            ids = client.tokenize([ChatMessage(role="user", content="hi")])
            found = Completion(0.0)
            asked = request_for(ids, Sampling(max_tokens=len(words.encode())))
            for response in client.generate(asked):
                found.add(response, 0.0)
            assert found.text == words
            assert client.detokenize(found.token_ids) == words

    await asyncio.to_thread(use)


def details(error: aio.AioRpcError) -> Status:
    trailers: Any = error.trailing_metadata()
    return Status.FromString(dict(trailers)["grpc-status-details-bin"])


async def test_a_refusal_names_the_field(target: str) -> None:
    async with aio.insecure_channel(target) as channel:
        call = InferenceStub(channel).Generate(request_for("x", Sampling(temperature=-1)))
        with pytest.raises(aio.AioRpcError) as raised:
            [response async for response in call]
    assert raised.value.code() == StatusCode.INVALID_ARGUMENT
    told, bad = details(raised.value), BadRequest()
    assert told.message == raised.value.details()
    assert told.details[0].Unpack(bad)
    assert [violation.field for violation in bad.field_violations] == ["temperature"]


async def test_a_full_queue_says_when_to_come_again(
    target: str, serving: Callable[..., Any]
) -> None:
    """On the coordinator's own port, and behind a gateway."""
    endless = request_for("x", Sampling(max_tokens=100_000))
    async with (
        Client(target) as client, aio.insecure_channel(target) as channel,
        serving(target) as served, httpx2.AsyncClient(base_url=served.url, timeout=60) as http,
    ):  # fmt: skip
        streams = [client.generate(endless) for _ in range(2)]  # one runs, one waits
        for stream in streams:
            assert (await anext(stream)).HasField("accepted")
        await anext(streams[0])
        with pytest.raises(aio.AioRpcError) as raised:
            [response async for response in InferenceStub(channel).Generate(endless)]
        for more in ({}, {"stream": True}):
            body = {"model": "speaker", "prompt": "x", "max_tokens": 4, **more}
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
        for stream in streams:
            await stream.aclose()
    assert raised.value.code() == StatusCode.RESOURCE_EXHAUSTED
    retry = RetryInfo()
    assert details(raised.value).details[0].Unpack(retry)
    assert retry.retry_delay.seconds > 0
