from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tknp.client import Client, Completion, received_ids, request_for
from tknp.errors import InvalidValue, ProtocolError, Unavailable
from tknp.rpc.ids import pack_ids
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import Accepted, ChatMessage, Finish, GenerateResponse


def test_malformed_ids_are_the_side_s_that_made_them() -> None:
    with pytest.raises(InvalidValue, match="token_ids=-1"):
        request_for([3, -1])
    with pytest.raises(ProtocolError, match="5 bytes"):
        received_ids(b"\0" * 5)


def test_requests_carry_the_prompt_in_its_own_field() -> None:
    assert request_for("hi", request_id="r").text == "hi"
    assert request_for([1, 2]).token_ids == b"\1\0\0\0\2\0\0\0"
    chat = request_for([ChatMessage(role="user", content="hi")], Sampling(max_tokens=3))
    assert chat.chat.messages[0].content == "hi"
    assert chat.sampling.max_tokens == 3


def test_completion_times_tokens_and_not_messages() -> None:
    completion = Completion(started_s=10.0)
    completion.add(GenerateResponse(accepted=Accepted(request_id="r", prompt_tokens=4)), 10.5)
    completion.add(GenerateResponse(token_ids=pack_ids([1, 2]), text="ab"), 11.0)
    assert (completion.ttft_s, completion.itl_s, completion.total_s) == (1.0, None, None)
    completion.add(GenerateResponse(token_ids=pack_ids([3, 4, 5]), text="c"), 14.0)
    completion.add(GenerateResponse(text="d", finish=Finish(owners=[1])), 15.0)
    assert (completion.ttft_s, completion.itl_s, completion.total_s) == (1.0, 1.0, 5.0)
    assert (completion.text, completion.token_ids) == ("abcd", [1, 2, 3, 4, 5])
    assert (completion.request_id, completion.prompt_tokens) == ("r", 4)


async def test_tokenize_takes_text_and_messages(fake_pool: Any) -> None:
    async with Client(fake_pool.target) as client:
        assert await client.tokenize("ab") == [97, 98]
        assert await client.tokenize([ChatMessage(role="user", content="c")]) == [99]


async def test_leaving_a_stream_cancels_the_call(fake_pool: Any) -> None:
    async with Client(fake_pool.target) as client:
        stream = client.generate(request_for("hang"))
        async for response in stream:
            if response.text:
                break
        await stream.aclose()
        assert await asyncio.to_thread(fake_pool.cancelled.wait, 10)


async def test_cancelling_the_task_cancels_the_call(fake_pool: Any) -> None:
    arrived = asyncio.Event()

    async def read(client: Client) -> None:
        async for _ in client.generate(request_for("hang")):
            arrived.set()

    async with Client(fake_pool.target) as client:
        task = asyncio.create_task(read(client))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(fake_pool.cancelled.wait, 10)


async def test_a_server_that_goes_away_is_not_called_absent(fake_pool: Any) -> None:
    async with Client(fake_pool.target) as client:
        stream = client.generate(request_for("hang"))
        await anext(stream)
        await asyncio.to_thread(fake_pool.stop)
        with pytest.raises(Unavailable, match=f"connection to {fake_pool.target} was lost"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("target", ["", "host", "host:", "host:0", "host:99999", ":1"])
async def test_malformed_targets_are_refused(target: str) -> None:
    with pytest.raises(InvalidValue, match="target="):
        Client(target)
