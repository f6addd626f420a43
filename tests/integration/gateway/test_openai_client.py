"""The official client, unmodified, against a gateway in front of a pool."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import pytest_asyncio

from tknp.local import InProcessPool

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "speaker"
GREEDY = {"model": MODEL, "temperature": 0}
HOT = {"model": MODEL, "temperature": 5.0}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    open_speaker: Callable[..., Any], serving: Callable[..., Any]
) -> AsyncIterator[SimpleNamespace]:
    pool = open_speaker()
    async with InProcessPool(pool), serving(pool.config.coordinator) as found:
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: SimpleNamespace) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="unused", max_retries=0
    ) as opened:
        yield opened


async def test_models(client: openai.AsyncOpenAI) -> None:
    listed = (await client.models.list()).data
    assert [model.id for model in listed] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError, match="served here: speaker"):
        await client.models.retrieve("absent")


async def test_a_completion(client: openai.AsyncOpenAI, words: str) -> None:
    found = await client.completions.create(**GREEDY, prompt="Say", max_tokens=5)
    assert found.object == "text_completion"
    assert found.choices[0].text == "Wave:"
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 5)
    assert found.usage.total_tokens == 8
    by_ids = await client.completions.create(**GREEDY, prompt=list(b"Say"), max_tokens=5)
    assert by_ids.choices[0].text == "Wave:"
    default = await client.completions.create(**GREEDY, prompt="Say")
    assert default.usage is not None
    assert default.usage.completion_tokens == 16


async def test_several_prompts_are_answered_in_order(client: openai.AsyncOpenAI) -> None:
    found = await client.completions.create(**GREEDY, prompt=["W", "a", "v"], max_tokens=2, n=2)
    assert [choice.text for choice in found.choices] == ["av", "av", "ve", "ve", "e:", "e:"]
    assert [choice.index for choice in found.choices] == list(range(6))
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (3, 12)


async def test_a_chat(client: openai.AsyncOpenAI, words: str) -> None:
    count = len(words.encode())
    found = await client.chat.completions.create(
        **GREEDY,
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        max_completion_tokens=count,
        user="somebody",
    )
    assert found.choices[0].message.content == words
    assert found.choices[0].message.role == "assistant"
    assert found.usage is not None
    assert found.usage.completion_tokens == count
    rendered = "system: Be brief.</s>user: hi</s>assistant: "
    assert found.usage.prompt_tokens == len(rendered) - 2 * len("</s>") + 2 + 1  # and <s>


async def test_streamed_text_is_the_whole_text(client: openai.AsyncOpenAI, words: str) -> None:
    """Characters of two to four bytes, a combining mark: no chunk ends inside one."""
    stream = await client.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": "hi"}], max_tokens=3 * len(words.encode()),
        stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    text = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(text) == words * 3
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(text)
    assert len([piece for piece in text if piece]) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks[-2:] if c.choices] == ["length"]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3 * len(words.encode())
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_random_bytes_stream_as_they_decode(client: openai.AsyncOpenAI) -> None:
    """Broken and whole characters in any order: stream and whole answer agree, byte for byte."""
    bias = {str(byte): 100 for byte in "🌊世é".encode()}
    asked: dict[str, Any] = {
        **HOT, "prompt": "x", "max_tokens": 120, "seed": 5, "logit_bias": bias,
    }  # fmt: skip
    whole = await client.completions.create(**asked)
    stream = await client.completions.create(**asked, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == whole.choices[0].text


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("e", "Wav", 4),
        (["never", "\U0001f30ao\u0301"], "Wave:", 12),
        (["never", "ve:", "v"], "Wa", 3),
        ("🌊 ", None, 20),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_stop_strings_span_tokens(
    client: openai.AsyncOpenAI, words: str, stop: Any, text: str | None, tokens: int, streamed: bool
) -> None:
    asked: dict[str, Any] = {**GREEDY, "prompt": "x", "max_tokens": 20, "stop": stop}
    if streamed:
        stream = await client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        found = "".join(c.choices[0].text for c in chunks if c.choices)
        reason = chunks[-2].choices[0].finish_reason
        usage = chunks[-1].usage
    else:
        answer = await client.completions.create(**asked)
        found, reason = answer.choices[0].text, answer.choices[0].finish_reason
        usage = answer.usage
    whole = (words * 2).encode()[:20].decode()
    assert found == (whole if text is None else text)
    assert reason == ("length" if text is None else "stop")
    assert usage is not None
    assert usage.completion_tokens == tokens


async def test_logprobs_of_a_completion(client: openai.AsyncOpenAI) -> None:
    found = await client.completions.create(**GREEDY, prompt="x", max_tokens=5, logprobs=2)
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == list("Wave:")
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 2
        assert top[token] == value == max(top.values())


async def test_logprobs_of_a_chat(client: openai.AsyncOpenAI, words: str) -> None:
    """The bytes of tokens make whole characters, whatever their texts look like."""
    asked: dict[str, Any] = {
        **GREEDY, "messages": [{"role": "user", "content": "hi"}], "logprobs": True,
        "top_logprobs": 3, "max_tokens": len(words.encode()),
    }  # fmt: skip
    found = await client.chat.completions.create(**asked)
    assert found.choices[0].logprobs is not None
    entries = found.choices[0].logprobs.content or []
    assert bytes(b for e in entries for b in e.bytes or ()).decode() == words
    assert all(len(e.top_logprobs) == 3 and e.logprob <= 0 for e in entries)
    stream = await client.chat.completions.create(**asked, stream=True)
    chunks = [chunk async for chunk in stream]
    streamed = [
        entry
        for chunk in chunks
        if (held := chunk.choices[0].logprobs) is not None
        for entry in held.content or ()
    ]
    assert [(e.bytes, e.logprob) for e in streamed] == [(e.bytes, e.logprob) for e in entries]


async def test_choices_differ_and_a_seed_repeats_them(client: openai.AsyncOpenAI) -> None:
    asked: dict[str, Any] = {**HOT, "prompt": "x", "max_tokens": 12, "n": 3}
    first, again, other = [
        [c.text for c in (await client.completions.create(**asked, seed=seed)).choices]
        for seed in (3, 3, 4)
    ]
    assert first == again != other
    assert len(set(first)) == 3
    stream = await client.completions.create(**asked, seed=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == first


async def test_penalties_bias_and_extensions_reach_the_sampler(client: openai.AsyncOpenAI) -> None:
    async def text(**values: Any) -> str:
        found = await client.completions.create(**{**GREEDY, "prompt": "x", **values})
        return found.choices[0].text

    assert await text(max_tokens=3, logit_bias={str(ord("x")): 100}) == "xxx"
    assert await text(max_tokens=200, frequency_penalty=2.0, presence_penalty=2.0) != await text(
        max_tokens=200
    )
    assert await text(max_tokens=40, extra_body={"stop_token_ids": [ord("v")]}) == "Wav"
    assert await text(max_tokens=5, temperature=9.0, extra_body={"top_k": 1}) == "Wave:"
    assert await text(max_tokens=5, temperature=9.0, extra_body={"min_p": 1.0}) == "Wave:"
    assert await text(max_tokens=5, temperature=9.0, top_p=1e-6) == "Wave:"
    assert await text(max_tokens=8, stop="W", extra_body={"min_tokens": 3}) != ""
    ended = {"logit_bias": {"257": 100}, "max_tokens": 4}
    assert await text(**ended) == ""
    found = await client.completions.create(
        **GREEDY, prompt="x", **ended, extra_body={"ignore_eos": True}
    )
    assert found.usage is not None
    assert found.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("values", "kind", "status", "param", "message"),
    [
        ({"max_tokens": 200_000}, openai.BadRequestError, 400, "max_tokens", "leave room for"),
        ({"temperature": -1}, openai.BadRequestError, 400, "temperature", "temperature=-1"),
        ({"top_p": 0}, openai.BadRequestError, 400, "top_p", "top_p=0"),
        ({"stop": [""]}, openai.BadRequestError, 400, "stop[0]", "1 to 256 characters"),
        ({"prompt": []}, openai.BadRequestError, 400, "prompt", "at least one token"),
        ({"prompt": ""}, openai.BadRequestError, 400, "prompt", "at least one token"),
        ({"logit_bias": {"a": 1}}, openai.BadRequestError, 400, "logit_bias", "token ids"),
        ({"prompt": [261]}, openai.BadRequestError, 400, "token_ids", "ids end at 260"),
        ({"best_of": 2}, openai.BadRequestError, 400, "best_of", "must equal n"),
        ({"model": "absent"}, openai.NotFoundError, 404, None, "served here: speaker"),
        ({"n": 0}, openai.UnprocessableEntityError, 422, "n", "greater than or equal to 1"),
        ({"max_tokens": "5"}, openai.UnprocessableEntityError, 422, "max_tokens", "integer"),
        ({"echo": True}, openai.UnprocessableEntityError, 422, "echo", "False"),
        ({"extra_body": {"best": 1}}, openai.UnprocessableEntityError, 422, "best", "Extra"),
        ({"extra_body": {"timeout_s": 1e-6}}, openai.APIStatusError, 408, None, ""),
    ],
)
async def test_errors_have_openais_shape(
    client: openai.AsyncOpenAI, values: dict[str, Any], kind: type[openai.APIStatusError],
    status: int, param: str | None, message: str,
) -> None:  # fmt: skip
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            await client.completions.create(**{**GREEDY, "prompt": "x", "stream": stream, **values})
        error = raised.value
        assert error.status_code == status
        assert error.param == param
        assert isinstance(error.body, dict)
        assert set(error.body) == {"message", "type", "param", "code"}
        assert message in error.body["message"]


async def test_a_deadline_ends_a_stream_that_has_begun(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        **GREEDY, prompt="x", max_tokens=100_000, stream=True, extra_body={"timeout_s": 1.0}
    )
    with pytest.raises(openai.APIError) as raised:
        [chunk async for chunk in stream]
    assert isinstance(raised.value.body, dict)
    assert raised.value.body["type"] == "timeout_error"


async def test_the_synchronous_client(served: SimpleNamespace) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="unused") as client:
            stream = client.completions.create(**GREEDY, prompt="x", max_tokens=5, stream=True)
            return "".join(chunk.choices[0].text for chunk in stream)

    assert await asyncio.to_thread(ask) == "Wave:"
