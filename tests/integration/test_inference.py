"""The public services of a whole pool: what is answered, what is refused, while others go on.

One pool serves the whole module; 128 tokens fit a node, and a request has one owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tknp.client import Client, Completion, RequestFailed, request_for
from tknp.local import InProcessPool
from tknp.model.tokenizer import load_tokenizer
from tknp.v1.common_pb2 import FinishReason, Phase, Sampling
from tknp.v1.inference_pb2 import ChatMessage, GenerateRequest, GenerateResponse

pytestmark = pytest.mark.asyncio(loop_scope="module")
NAN = float("nan")
EOS = 257
SERVICES = ("tknp.v1.Inference", "tknp.v1.Coordinator")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> AsyncIterator[InProcessPool]:
    path = random_checkpoint(layers=2, q_heads=4, kv_heads=2)
    opened = make_pool(
        path, nodes=2, page_size=16, prefill_chunk=24, kv_memory_bytes=9 * 16 * 512, max_batch=8,
        kv_transfer="grpc", width=1,
    )  # fmt: skip
    async with InProcessPool(opened) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(pool: InProcessPool) -> AsyncIterator[Client]:
    async with Client(pool.coordinator.driver.pool.config.coordinator) as opened:
        yield opened


def sampling(max_tokens: int = 8, **values: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True, **values)


async def complete(client: Client, request: GenerateRequest) -> Completion:
    completion = Completion(0.0)
    async for response in client.generate(request):
        completion.add(response, 0.0)
    assert completion.finish is not None
    return completion


async def test_requests_stream_side_by_side(client: Client) -> None:
    """More than max_batch: some wait. Each stream is what the request gives alone."""
    jobs = [([n + 1] * (n + 1), 5 + 2 * n) for n in range(14)]
    requests = [request_for(prompt, sampling(tokens)) for prompt, tokens in jobs]
    together = await asyncio.gather(*(complete(client, request) for request in requests))
    for (prompt, tokens), completion in zip(jobs, together, strict=True):
        assert completion.finish.reason == FinishReason.FINISH_REASON_LENGTH
        assert completion.finish.prompt_tokens == completion.prompt_tokens == len(prompt)
        assert completion.finish.completion_tokens == len(completion.token_ids) == tokens
    alone = [await complete(client, request) for request in requests[::5]]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[::5]]


async def test_tokens_arrive_while_others_are_computed(client: Client) -> None:
    """Not in one message at the end: the first comes while the request still runs."""
    responses = [r async for r in client.generate(request_for([5, 6], sampling(40)))]
    first, *middle, last = responses
    assert first.HasField("accepted")
    assert not first.token_ids
    assert len(middle) > 3
    assert all(r.token_ids and not r.HasField("finish") for r in middle)
    assert last.HasField("finish")


async def test_tokens_come_together_where_nobody_reads_along(client: Client) -> None:
    """The first at once, then as many to a message as asked for; all of what one by one gives."""

    def asked(interval: int, **values: Any) -> GenerateRequest:
        request = request_for("what comes together", sampling(20, **values))
        request.stream_interval = interval
        return request

    each = await complete(client, asked(1, logprobs=1))
    responses = [r async for r in client.generate(asked(8, logprobs=1))]
    assert [len(r.token_ids) // 4 for r in responses] == [0, 1, 8, 8, 3]
    assert [len(r.logprobs) for r in responses] == [0, 1, 8, 8, 3]
    assert [r.HasField("finish") for r in responses] == [False] * 4 + [True]
    assert "".join(r.text for r in responses) == each.text
    stopped = asked(1024)
    stopped.stop.append(each.text[len(each.text) // 2 :][:3])
    cut = await complete(client, stopped)
    assert cut.finish.stop == stopped.stop[0]
    assert cut.text == each.text[: each.text.find(stopped.stop[0])]
    assert cut.finish.completion_tokens == len(cut.token_ids) <= 20


async def test_a_stop_token_ends_a_request(client: Client) -> None:
    free = await complete(client, request_for([1, 2, 3], sampling(12)))
    stop = free.token_ids[7]
    ended = await complete(client, request_for([1, 2, 3], sampling(12, stop_token_ids=[stop])))
    cut = free.token_ids.index(stop) + 1
    assert ended.token_ids == free.token_ids[:cut]
    assert ended.finish.reason == FinishReason.FINISH_REASON_STOP


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (GenerateRequest(), "INVALID_ARGUMENT", "prompt=''"),
        (GenerateRequest(token_ids=b""), "INVALID_ARGUMENT", "must have at least one token"),
        (GenerateRequest(token_ids=b"12345"), "INVALID_ARGUMENT", "token_ids='5 bytes'"),
        (request_for([3, 261]), "INVALID_ARGUMENT", "token_ids=261: ids end at 260"),
        (
            request_for([1] * 128), "INVALID_ARGUMENT",
            "prompt='128 tokens': at most 127, and one of output: the KV pages of one node",
        ),
        (request_for([1] * 600), "INVALID_ARGUMENT", "prompt='600 tokens': at most 127"),
        (
            request_for([1] * 100, Sampling(max_tokens=29)), "INVALID_ARGUMENT",
            "max_tokens=29: at most 28 after a prompt of 100 tokens",
        ),
        (request_for([1], Sampling(max_tokens=0)), "INVALID_ARGUMENT", "max_tokens=0"),
        (request_for([1], Sampling(temperature=NAN)), "INVALID_ARGUMENT", "temperature=nan"),
        (request_for([1], Sampling(temperature=-1)), "INVALID_ARGUMENT", "temperature=-1"),
        (request_for([1], Sampling(top_p=0.0)), "INVALID_ARGUMENT", "top_p=0"),
        (request_for([1], Sampling(top_p=NAN)), "INVALID_ARGUMENT", "top_p=nan"),
        (request_for([1], Sampling(logprobs=21)), "INVALID_ARGUMENT", "logprobs=21"),
        (
            request_for([1], Sampling(stop_token_ids=[261])), "INVALID_ARGUMENT",
            "stop_token_ids=261",
        ),
        (
            request_for([1], Sampling(logit_bias={9999: 1.0})), "INVALID_ARGUMENT",
            "logit_bias=9999",
        ),
        (
            request_for([1], Sampling(max_tokens=2, min_tokens=3)), "INVALID_ARGUMENT",
            "min_tokens=3",
        ),
        (request_for([1], request_id="x" * 129), "INVALID_ARGUMENT", "at most 128 characters"),
        (
            GenerateRequest(text="a", stream_interval=1025), "INVALID_ARGUMENT",
            "stream_interval=1025: at most 1024 tokens",
        ),
        (GenerateRequest(text="a", timeout_s=NAN), "INVALID_ARGUMENT", "timeout_s=nan"),
        (GenerateRequest(text="a", timeout_s=-1), "INVALID_ARGUMENT", "timeout_s=-1.0"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_refused_while_others_go_on(
    request_: GenerateRequest, code: str, message: str, client: Client
) -> None:
    other = client.generate(request_for([9], sampling(60)))
    ids = [r.token_ids for r in [await anext(other), await anext(other)]]
    refused = (await client.status()).refused
    with pytest.raises(RequestFailed) as raised:
        await complete(client, request_)
    assert raised.value.code == code
    assert message in raised.value.message
    assert (await client.status()).refused == refused + 1
    ids += [r.token_ids async for r in other]
    assert sum(map(len, ids)) == 4 * 60


async def test_the_longest_request_that_fits_is_taken(client: Client) -> None:
    completion = await complete(client, request_for([1] * 127))
    assert completion.finish.completion_tokens == 1
    completion = await complete(client, request_for([1] * 100, Sampling(ignore_eos=True)))
    assert completion.finish.completion_tokens == 28


async def test_request_ids_are_the_clients_own(client: Client) -> None:
    """Two requests may bear one name at the same time; unnamed ones get different names."""
    requests = [request_for([n + 1], sampling(20), "twin") for n in range(2)]
    twins = await asyncio.gather(*(complete(client, request) for request in requests))
    assert [c.request_id for c in twins] == ["twin", "twin"]
    assert twins[0].token_ids != twins[1].token_ids
    unnamed = [await complete(client, request_for([1], sampling(1))) for _ in range(2)]
    assert unnamed[0].request_id
    assert unnamed[0].request_id != unnamed[1].request_id


async def test_streamed_text_is_the_decoded_text(pool: InProcessPool, client: Client) -> None:
    """Bytes of a random model are rarely UTF-8: pieces of characters must join as a whole does."""
    tokenizer = load_tokenizer(pool.coordinator.driver.pool.checkpoint)
    hot = sampling(60, temperature=3.0, seed=11)
    completion = await complete(client, request_for("sea 🌊", hot))
    assert completion.text == tokenizer.decode(completion.token_ids)
    assert completion.prompt_tokens == len(tokenizer.encode("sea 🌊"))


async def test_a_seed_decides_a_sample(client: Client) -> None:
    def hot(seed: int) -> GenerateRequest:
        return request_for([4, 5], sampling(20, temperature=2.0, seed=seed))

    one, again, other = [await complete(client, hot(seed)) for seed in (1, 1, 2)]
    assert one.token_ids == again.token_ids != other.token_ids


async def test_logprobs_come_with_every_token(client: Client) -> None:
    completion = await complete(client, request_for([1, 2], sampling(6, logprobs=3)))
    assert len(completion.logprobs) == len(completion.token_ids) == 6
    for token, logprobs in zip(completion.token_ids, completion.logprobs, strict=True):
        likeliest = logprobs.alternatives[0]
        assert len(logprobs.alternatives) == 3
        assert likeliest.token_id == token
        assert likeliest.logprob == logprobs.chosen <= 0
        assert [a.logprob for a in logprobs.alternatives] == sorted(
            (a.logprob for a in logprobs.alternatives), reverse=True
        )
    plain = await complete(client, request_for([1, 2], sampling(6)))
    assert plain.token_ids == completion.token_ids
    assert not plain.logprobs


async def test_chat_goes_through_the_template(pool: InProcessPool, client: Client) -> None:
    messages = [ChatMessage(role="user", content="hi")]
    ids = await client.tokenize(messages)
    tokenizer = load_tokenizer(pool.coordinator.driver.pool.checkpoint)
    assert tokenizer.decode(ids) == "user: hiassistant: "
    chat = await complete(client, request_for(messages, sampling()))
    same = await complete(client, request_for(ids, sampling()))
    assert (chat.token_ids, chat.prompt_tokens) == (same.token_ids, len(ids))
    assert await client.tokenize("é") == list("é".encode())


async def test_model_and_status(pool: InProcessPool, client: Client) -> None:
    model = await client.model()
    assert (model.vocab_size, model.max_model_len, model.has_chat_template) == (261, 128, True)
    assert (model.family, model.dtype, list(model.eos_token_ids)) == ("llama", "float32", [EOS])
    before = await client.status()
    await complete(client, request_for([1], sampling(2)))
    status = await client.status()
    assert (status.ready, status.phase, status.error) == (True, Phase.PHASE_READY, "")
    assert (status.max_model_len, status.page_size, status.tp) == (128, 16, 1)
    assert status.completed == before.completed + 1
    assert status.steps > before.steps
    assert [node.pages for node in status.nodes] == [8, 8]
    assert [list(node.addresses) for node in status.nodes] == [
        list(node.addresses) for node in pool.coordinator.driver.pool.config.nodes
    ]
    assert status.prefill[0].kv_transfer == status.kv_transfer == "grpc"


async def test_health_and_reflection(client: Client) -> None:
    async with aio.insecure_channel(client.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", *SERVICES):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for metadata in ((), (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)):
            watch = health.Watch(health_pb2.HealthCheckRequest(), metadata=metadata)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in reflection.ServerReflectionInfo(iter([ask])):
            found = {service.name for service in answer.list_services_response.service}
            assert found >= {*SERVICES, "grpc.health.v1.Health"}


async def test_an_unfinished_stream_is_not_passed_off_as_whole(client: Client) -> None:
    """Every response before the last lacks `finish`; the last one has it, and nothing follows."""
    responses: list[GenerateResponse] = [
        response async for response in client.generate(request_for([2], sampling(9)))
    ]
    assert [r.HasField("finish") for r in responses] == [False] * (len(responses) - 1) + [True]
    timings = responses[-1].finish.timings
    assert 0 <= timings.queue_s <= timings.ttft_s <= timings.total_s
    assert timings.ttft_s == pytest.approx(timings.queue_s + timings.prefill_s)


async def test_no_pages_are_left_behind(pool: InProcessPool, client: Client) -> None:
    """After all of the above: nothing runs, every page is free."""
    while any(node.used_pages for node in (await client.status()).nodes):
        pass
    for node in pool.nodes:
        books = node.runtime.books
        assert books is not None
        books.check_integrity()
        assert books.free_tokens == books.total_tokens


async def test_a_stop_string_ends_the_text_before_it_and_frees_the_request(client: Client) -> None:
    whole = await complete(client, request_for("stop here", sampling(24)))
    middle = whole.text[len(whole.text) // 2 :]
    stop = middle[:3]
    at = whole.text.find(stop)
    request = request_for("stop here", sampling(24))
    request.stop.extend(["never", stop])
    before = await client.status()
    found = await complete(client, request)
    assert found.text == whole.text[:at]
    assert found.finish is not None
    assert found.finish.stop == stop
    assert found.finish.reason == FinishReason.FINISH_REASON_STOP
    assert found.finish.completion_tokens == len(found.token_ids) <= len(whole.token_ids)
    assert found.token_ids == whole.token_ids[: len(found.token_ids)]
    status = await client.status()
    assert (status.completed, status.cancelled) == (before.completed + 1, before.cancelled)


async def test_logprobs_carry_the_text_of_their_tokens(client: Client) -> None:
    answer = await complete(client, request_for("texts", sampling(6, logprobs=2)))
    spoken = b"".join(entry.token for entry in answer.logprobs)
    assert spoken.decode(errors="replace") == answer.text
    assert all(a.token or a.token_id >= 259 for e in answer.logprobs for a in e.alternatives)


async def test_detokenize_is_the_inverse_of_tokenize(client: Client) -> None:
    ids = await client.tokenize("h\u00e9llo \u4e16\u754c")
    assert await client.detokenize(ids) == "h\u00e9llo \u4e16\u754c"
    with pytest.raises(RequestFailed, match="token_ids"):
        await client.detokenize([99_999])
