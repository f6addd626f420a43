"""Both clients against a server that fails as it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import aio

from tknp.client import BlockingClient, Client, RequestFailed, request_for
from tknp.errors import InvalidValue, Unavailable
from tknp.rpc.ids import pack_ids
from tknp.v1 import inference_pb2 as pb
from tknp.v1.inference_pb2_grpc import InferenceServicer, add_InferenceServicer_to_server


class Flaky(InferenceServicer):
    """Fails `failures` calls with `code`; after the first message of a stream if `late`."""

    def __init__(self) -> None:
        self.failures, self.calls, self.cancelled = 0, 0, asyncio.Event()
        self.code, self.late, self.endless = grpc.StatusCode.UNAVAILABLE, False, False

    async def _fail(self, context: Any) -> None:
        if self.failures:
            self.failures -= 1
            await context.abort(self.code, "not now")

    async def GetModel(self, request: pb.GetModelRequest, context: Any) -> pb.GetModelResponse:
        self.calls += 1
        await self._fail(context)
        return pb.GetModelResponse(name="flaky")

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        return pb.TokenizeResponse()

    async def Detokenize(
        self, request: pb.DetokenizeRequest, context: Any
    ) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse()

    async def Generate(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateResponse]:
        self.calls += 1
        try:
            if not self.late:
                await self._fail(context)
            yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r"))
            await self._fail(context)
            if self.endless:
                await asyncio.Event().wait()
            yield pb.GenerateResponse(token_ids=pack_ids([1]), text="a", finish=pb.Finish())
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest_asyncio.fixture
async def served() -> AsyncIterator[tuple[Flaky, str]]:
    server, flaky = aio.server(), Flaky()
    add_InferenceServicer_to_server(flaky, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield flaky, f"127.0.0.1:{port}"
    await server.stop(None)


async def test_questions_are_asked_again(served: tuple[Flaky, str]) -> None:
    flaky, target = served
    flaky.failures = 2
    async with Client(target, retries=2) as client:
        assert (await client.model(60.0)).name == "flaky"
    assert flaky.calls == 3


async def test_no_more_often_than_asked_for(served: tuple[Flaky, str]) -> None:
    flaky, target = served
    flaky.failures = 9
    async with Client(target, retries=1) as client:
        with pytest.raises((RequestFailed, Unavailable)):
            await client.model(60.0)
        assert flaky.calls == 2
    async with Client(target) as client:
        with pytest.raises((RequestFailed, Unavailable)):
            await client.model(60.0)
        assert flaky.calls == 3


async def test_a_refusal_is_final(served: tuple[Flaky, str]) -> None:
    flaky, target = served
    flaky.failures, flaky.code = 1, grpc.StatusCode.INVALID_ARGUMENT
    async with Client(target, retries=3) as client:
        with pytest.raises(RequestFailed, match="not now"):
            await client.model(60.0)
    assert flaky.calls == 1


@pytest.mark.parametrize(("late", "calls"), [(False, 2), (True, 1)])
async def test_a_generation_is_made_again_only_before_it_began(
    served: tuple[Flaky, str], late: bool, calls: int
) -> None:
    flaky, target = served
    flaky.failures, flaky.late = 1, late
    async with Client(target, retries=1) as client:
        stream = client.generate(request_for("x"), 60.0)
        if late:
            assert (await anext(stream)).accepted.request_id == "r"
            with pytest.raises((RequestFailed, Unavailable)):
                await anext(stream)
        else:
            assert [r.text async for r in stream] == ["", "a"]
    assert flaky.calls == calls


async def test_leaving_a_stream_cancels_it(served: tuple[Flaky, str]) -> None:
    flaky, target = served
    flaky.endless = True
    async with Client(target) as client:
        stream = client.generate(request_for("x"), 60.0)
        await anext(stream)
        await stream.aclose()
        await asyncio.wait_for(flaky.cancelled.wait(), 60)


async def test_the_client_that_waits(served: tuple[Flaky, str]) -> None:
    flaky, target = served
    flaky.failures = 1

    def use() -> None:
        with BlockingClient(target, retries=1) as client:
            assert client.model(60.0).name == "flaky"
            assert [r.text for r in client.generate(request_for("x"), 60.0)] == ["", "a"]
            flaky.endless = True
            stream = client.generate(request_for("x"), 60.0)
            next(stream)
            stream.close()  # type: ignore[attr-defined]
        client.close()

    await asyncio.to_thread(use)
    await asyncio.wait_for(flaky.cancelled.wait(), 60)


def test_what_neither_takes() -> None:
    with pytest.raises(InvalidValue, match="retries=-1"):
        BlockingClient("127.0.0.1:1", retries=-1)
    with pytest.raises(InvalidValue, match="target="):
        BlockingClient("nowhere")
