"""Output held to a schema, by the official client: whole, streamed, beside others, replayed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
import pytest_asyncio

from tknp.client import Client, received_ids, request_for
from tknp.local import InProcessPool
from tknp.rpc.ids import pack_ids
from tknp.v1.common_pb2 import FinishReason, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "people": {"type": "integer", "minimum": 0, "maximum": 9000},
        "seas": {"type": "array", "items": {"enum": ["north", "south"]}, "maxItems": 2},
    },
    "required": ["city", "people", "seas"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "city", "strict": True, "schema": SCHEMA},
}
CHAT: dict[str, Any] = {
    "model": "speaker",
    "messages": [{"role": "user", "content": "A city"}],
    "max_tokens": 400,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(
    open_speaker: Callable[..., Any], serving: Callable[..., Any]
) -> AsyncIterator[SimpleNamespace]:
    pool = open_speaker()
    async with InProcessPool(pool), serving(pool.config.coordinator) as found:
        found.address = pool.config.coordinator
        yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: SimpleNamespace) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="unused", max_retries=0
    ) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 5.0])
async def test_a_schema_is_kept(client: openai.AsyncOpenAI, temperature: float) -> None:
    asked: dict[str, Any] = {
        **CHAT, "response_format": FORMAT, "temperature": temperature, "seed": 4
    }  # fmt: skip
    whole = (await client.chat.completions.create(**asked)).choices[0]
    assert whole.finish_reason == "stop"
    assert whole.message.content is not None
    jsonschema.validate(json.loads(whole.message.content), SCHEMA)
    stream = await client.chat.completions.create(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.message.content


async def test_any_object(client: openai.AsyncOpenAI) -> None:
    found = await client.chat.completions.create(
        **CHAT, response_format={"type": "json_object"}, temperature=2.0, seed=1,
        logit_bias={str(ord("}")): 60},
    )  # fmt: skip
    assert found.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(found.choices[0].message.content or ""), dict)


async def test_text_is_the_default(client: openai.AsyncOpenAI, words: str) -> None:
    asked: dict[str, Any] = {**CHAT, "temperature": 0.0, "max_tokens": len(words.encode())}
    found = await client.chat.completions.create(**asked, response_format={"type": "text"})
    assert found.choices[0].message.content == words


async def test_others_in_the_batch_are_as_they_are_alone(client: openai.AsyncOpenAI) -> None:
    async def text(seed: int, **more: Any) -> str | None:
        asked = {**CHAT, "max_tokens": 60, "temperature": 3.0, "seed": seed, **more}
        found: openai.types.chat.ChatCompletion = await client.chat.completions.create(**asked)
        return found.choices[0].message.content

    alone = [await text(seed) for seed in range(4)]
    held = [text(seed, response_format=FORMAT, max_tokens=400) for seed in range(4)]
    mixed = await asyncio.gather(*(text(seed) for seed in range(4)), *held)
    assert mixed[:4] == alone
    for found in mixed[4:]:
        jsonschema.validate(json.loads(found or ""), SCHEMA)


async def test_a_stream_goes_on_where_another_ended(served: SimpleNamespace) -> None:
    """What a gateway asks of the next pool: prompt and generated ids, the same schema and seed."""
    sampling = Sampling(temperature=5.0, seed=7, max_tokens=400, json_schema=json.dumps(SCHEMA))
    async with Client(served.address) as client:
        ids, text = await _run(client, sampling, b"")
        jsonschema.validate(json.loads(text), SCHEMA)
        for cut in (1, len(ids) // 2, len(ids) - 1):
            rest, _ = await _run(client, sampling, ids[:cut])
            assert ids[:cut] + rest == ids


@pytest.mark.parametrize(
    "settings",
    [
        {"microbatches": 2},
        *(
            pytest.param(settings, marks=pytest.mark.full)
            for settings in (
                {"copies": 2}, {"strategy": "dp"}, {"strategy": "pp"}, {"strategy": "dcp"},
                {"strategy": "helix"}, {"strategy": "tp", "nodes": 1, "tp": 2, "prefill_tp": 2},
                {"roles": ("attention-owner", "decode-root")},
            )
        ),
    ],
)  # fmt: skip
async def test_every_strategy_draws_the_same(
    served: SimpleNamespace, open_speaker: Callable[..., Any], settings: dict[str, Any]
) -> None:
    sampling = [
        Sampling(temperature=5.0, seed=seed, max_tokens=400, json_schema=json.dumps(SCHEMA))
        for seed in range(2)
    ]
    pool = open_speaker(**settings)
    async with (
        Client(served.address) as here,
        InProcessPool(pool),
        Client(pool.config.coordinator) as there,
    ):
        expected = [await _run(here, one, b"") for one in sampling]
        assert await asyncio.gather(*(_run(there, one, b"") for one in sampling)) == expected


async def _run(client: Client, sampling: Sampling, generated: list[int] | bytes) -> Any:
    request = request_for("x", sampling)
    request.generated_token_ids = pack_ids(list(generated))
    ids: list[int] = []
    text = ""
    async for response in client.generate(request, 60.0):
        ids += received_ids(response.token_ids)
        text += response.text
    assert response.finish.reason == FinishReason.FINISH_REASON_STOP
    return ids, text


@pytest.mark.parametrize(
    ("wanted", "status", "param", "message"),
    [
        ({"type": "json_schema"}, 422, "response_format.json_schema.json_schema", "required"),
        ({"type": "xml"}, 422, "response_format", "json_schema"),
        ({**FORMAT, "json_schema": {"name": "a b", "schema": {}}}, 422, None, "pattern"),
        (
            {**FORMAT, "json_schema": {"name": "a", "schema": {"type": "foo"}}},
            400, "response_format", "Invalid type: foo",
        ),
        (
            {**FORMAT, "json_schema": {"name": "a", "schema": {"title": "x" * 40_000}}},
            400, "response_format", "at most 32768",
        ),
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_is_refused(
    client: openai.AsyncOpenAI, wanted: dict[str, Any], status: int, param: str | None, message: str
) -> None:
    asked: dict[str, Any] = {**CHAT, "response_format": wanted}
    with pytest.raises(openai.APIStatusError) as raised:
        await client.chat.completions.create(**asked)
    assert raised.value.status_code == status
    if param is not None:
        assert raised.value.param == param
    assert message in raised.value.message
