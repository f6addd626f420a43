"""Pools under fuzz, and messages made of those that they would accept.

A template that would be accepted is taken, and any of its fields, however deep, is dropped or
replaced by another value of its type.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

from tknp.local import InProcessPool
from tknp.rpc.ids import pack_ids, unpack_ids
from tknp.v1 import (
    attention_owner_pb2,
    common_pb2,
    coordinator_pb2,
    decode_root_pb2,
    inference_pb2,
    prefill_pb2,
    step_pb2,
)
from tknp.v1.attention_owner_pb2 import KvChunk, ReleaseRequest, ReserveRequest, TransferRequest
from tknp.v1.common_pb2 import RequestKey, Sampling
from tknp.v1.decode_root_pb2 import PrepareRequest
from tknp.v1.inference_pb2 import Chat, ChatMessage, GenerateRequest
from tknp.v1.prefill_pb2 import PrefillChunk, PrefillRequest

PAGE, EPOCH, WRITER, PROMPT = 16, 1, "fuzz-writer", [5, 6, 7, 8, 9]
KEY = RequestKey(request_id="fuzz", attempt=3)
CALL_S = 20.0
MODULES = (attention_owner_pb2, coordinator_pb2, decode_root_pb2, inference_pb2, prefill_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


def _integers(bits: int, signed: bool) -> st.SearchStrategy[int]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    edges = [low, low + 1, high - 1, high, 0, 1, 2**31 - 1, PAGE, PAGE + 1]
    near = st.sampled_from([edge for edge in edges if low <= edge <= high])
    return near | st.integers(max(low, -3), 70) | st.integers(low, high)


def _floats(width: Any) -> st.SearchStrategy[float]:
    odd = st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, -1.0, 1.0, 3600.0])
    return odd | st.floats(width=width)


_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_UINT32: _integers(32, False),
    FieldDescriptor.TYPE_UINT64: _integers(64, False),
    FieldDescriptor.TYPE_INT32: _integers(32, True),
    FieldDescriptor.TYPE_INT64: _integers(64, True),
    FieldDescriptor.TYPE_ENUM: _integers(32, True),
    FieldDescriptor.TYPE_FLOAT: _floats(32),
    FieldDescriptor.TYPE_DOUBLE: _floats(64),
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.text(st.characters(codec="utf-8"), max_size=20)
    | st.sampled_from(["\0", "a" * 5000, "127.0.0.1:1", "fuzz", "\n\x1b[2J", "%s{0}", ":"]),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40)
    | st.lists(_integers(32, False), max_size=80).map(pack_ids),
}


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return st.builds(lambda m: m, mutated(field.message_type._concrete_class()))
    return _SCALARS[field.type]


@st.composite
def mutated(draw: st.DrawFn, template: Message) -> Message:
    """`template` with fields kept (mostly), dropped, or set to any value of their type."""
    message = type(template)()
    message.CopyFrom(template)
    for field in message.DESCRIPTOR.fields:
        fate = draw(st.sampled_from(["keep", "keep", "keep", "keep", "deeper", "drop", "other"]))
        if fate == "keep":
            continue
        entry = field.message_type
        if field.is_repeated and entry is not None and entry.GetOptions().map_entry:
            key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
            found = draw(st.dictionaries(_value(key), _value(value), max_size=4))
            message.ClearField(field.name)
            getattr(message, field.name).update(found)
        elif field.is_repeated:
            items = list(getattr(message, field.name))
            kept = draw(st.lists(st.sampled_from(items), max_size=5)) if items else []
            if fate == "other" or not items:
                kept += draw(st.lists(_value(field), max_size=5))
            message.ClearField(field.name)
            if fate != "drop":
                getattr(message, field.name).extend(kept)
        elif fate == "drop":
            message.ClearField(field.name)
        elif entry is not None:
            inner = getattr(message, field.name)
            inner.CopyFrom(draw(mutated(inner if fate == "deeper" else type(inner)())))
        elif field.containing_oneof is None or fate == "other":
            setattr(message, field.name, draw(_value(field)))
    return message


def _wire(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


class Target:
    """A running pool and what of it tests reach; calls are synchronous, one channel an address."""

    methods = METHODS
    mutated = staticmethod(mutated)

    def __init__(self, pool: Any) -> None:
        self.config = pool.config
        self.vocab_size = pool.checkpoint.config.vocab_size
        self.compatibility = pool.compatibility
        self.layout = pool.layout
        self.loop = asyncio.new_event_loop()
        self._pool = pool
        self._channels: dict[str, grpc.Channel] = {}
        self._stop = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._run(),))

    async def _run(self) -> None:
        try:
            async with InProcessPool(self._pool) as self.running:
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()

    def __enter__(self) -> Target:
        self._thread.start()
        self._ready.wait()
        self.expected = self.generate()
        return self

    def __exit__(self, *error: object) -> None:
        for channel in self._channels.values():
            channel.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def ask(self, coroutine: Any) -> Any:
        """Run `coroutine` on the pool's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(CALL_S)

    def addresses(self, service: str) -> list[str]:
        if service in ("Inference", "Coordinator"):
            return [self.config.coordinator]
        groups = self.config.prefill if service == "Prefill" else self.config.nodes
        return [address for group in groups for address in group.addresses]

    def call(self, address: str, path: str, *requests: Any) -> tuple[Any, list[Any], str]:
        """Status, answers and details of one call; messages may be bytes already."""
        method, channel = METHODS[path], self._channel(address)
        kind = ("stream" if method.client_streaming else "unary") + "_stream"
        make: Callable[..., Any] = getattr(channel, kind)
        answer = method.output_type._concrete_class.FromString
        given: Any = iter(requests) if method.client_streaming else requests[0]
        # Any kind of answer can be read as a stream.
        call = make(path, _wire, answer)(given, timeout=CALL_S)
        answers: list[Any] = []
        with suppress(grpc.RpcError):
            answers.extend(call)
        return call.code(), answers, call.details() or ""

    def _channel(self, address: str) -> grpc.Channel:
        if address not in self._channels:
            self._channels[address] = grpc.insecure_channel(address)
        return self._channels[address]

    def owner(self, method: str, message: Message, node: int = 0, t: int = 0) -> Any:
        address = self.config.nodes[node].addresses[t]
        return self.call(address, f"/tknp.v1.AttentionOwner/{method}", message)

    def reserved(self) -> list[common_pb2.Placement]:
        """Pages for PROMPT at node 0."""
        message = ReserveRequest(key=KEY, epoch=EPOCH, tokens=40, lease_s=30)
        code, answers, details = self.owner("Reserve", message)
        assert code is grpc.StatusCode.OK, details
        return list(answers[0].placements)

    def clean(self, *requests: Message) -> None:
        """Give back whatever `requests` may hold."""
        for message in (TransferRequest(key=KEY, writer=WRITER), *requests):
            key, writer = getattr(message, "key", None), getattr(message, "writer", WRITER)
            if not isinstance(key, RequestKey):
                continue
            for node in range(len(self.config.nodes)):
                self.owner("Abort", TransferRequest(key=key, writer=writer), node)
                self.owner("Release", ReleaseRequest(key=key, epoch=EPOCH), node)

    def generate(self) -> list[list[int]]:
        """Tokens of a few prompts, longer than a page among them."""
        results = []
        for length in (1, 15, 17, 40):
            ids = pack_ids([3 + n % 200 for n in range(length)])
            sampling = Sampling(max_tokens=12, ignore_eos=True)
            request = GenerateRequest(token_ids=ids, sampling=sampling)
            code, answers, details = self.call(
                self.config.coordinator, "/tknp.v1.Inference/Generate", request
            )
            assert code is grpc.StatusCode.OK, details
            results.append([i for a in answers for i in unpack_ids("token_ids", a.token_ids)])
        return results

    def used_pages(self) -> int:
        """What the coordinator counts as reserved or running."""
        request = coordinator_pb2.GetStatusRequest()
        code, answers, details = self.call(
            self.config.coordinator, "/tknp.v1.Coordinator/GetStatus", request
        )
        assert code is grpc.StatusCode.OK, details
        return sum(node.used_pages for node in answers[0].nodes)

    def check(self) -> None:
        """The pool is as it was: its tokens, every page free and in one place."""
        assert self.generate() == self.expected
        while self.used_pages():  # a request's pages are free a step after its last token
            pass

        async def pages() -> None:
            for node in self.running.nodes:
                books = node.runtime.books
                if books is not None:
                    books.check_integrity()
                    assert books.free_tokens == books.total_tokens
                    assert not len(node.runtime.windows)

        self.ask(pages())

    def templates(self, pages: list[common_pb2.Placement]) -> dict[str, list[Message]]:
        """What each method would accept, by the name of its request."""
        ids, sampling = pack_ids(PROMPT), Sampling(max_tokens=3, seed=1)
        owners = [self.config.nodes[0].addresses[p.tp_rank] for p in pages]
        turns = Chat(messages=[ChatMessage(role="user", content="hello")])
        transfer = TransferRequest(
            key=KEY, epoch=EPOCH, writer=WRITER, lease_s=30, compatibility=self.compatibility
        )
        admit = step_pb2.Admit(
            slot=1, key=KEY, owners=[1, 0], position=5, token=9, sampling=sampling,
            generated_count=1, prompt_token_ids=ids, generated_token_ids=pack_ids([9]), pages=[1],
            shares=step_pb2.Shares(
                owners=[1, 0], prompt=5, interleave=2, unit=PAGE,
                phases=[step_pb2.SharesPhase(start=5, shards=[0, 1])],
            ),
        )  # fmt: skip
        chunk = PrefillChunk(
            key=KEY, epoch=EPOCH, token_ids=ids, prompt_tokens=5, last=True, placements=pages,
            owners=owners, writer=WRITER,
        )  # fmt: skip
        found: list[Message] = [
            GenerateRequest(text="hello", sampling=sampling),
            GenerateRequest(token_ids=ids, sampling=sampling),
            GenerateRequest(chat=turns, sampling=sampling),
            inference_pb2.TokenizeRequest(text="hello"),
            inference_pb2.TokenizeRequest(chat=turns),
            inference_pb2.DetokenizeRequest(token_ids=ids),
            inference_pb2.GetModelRequest(),
            coordinator_pb2.GetStatusRequest(),
            common_pb2.DescribeRequest(),
            ReserveRequest(key=RequestKey(request_id="other"), epoch=EPOCH, tokens=40, lease_s=30),
            attention_owner_pb2.ExtendRequest(key=KEY, epoch=EPOCH, tokens=20),
            ReleaseRequest(key=KEY, epoch=EPOCH),
            transfer,
            KvChunk(
                key=KEY, epoch=EPOCH, writer=WRITER, head_stop=1, pages=pages[0].pages[:1],
                slots=PAGE, data=bytes(PAGE * 16 * 4),
            ),
            step_pb2.Step(epoch=EPOCH, step=0, admits=[admit]),
            PrefillRequest(
                key=KEY, epoch=EPOCH, token_ids=ids, sampling=sampling, placements=pages,
                owners=owners,
            ),
            chunk,
            PrepareRequest(json_schema='{"type": "object"}'),
        ]  # fmt: skip
        result: dict[str, list[Message]] = {}
        for message in found:
            result.setdefault(message.DESCRIPTOR.name, []).append(message)
        return result


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`path`: of every method."""
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", METHODS, ids=lambda path: path.split(".")[-1])


@pytest.fixture(scope="module")
def target(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> Iterator[Target]:
    pool = make_pool(
        random_checkpoint(max_position=64), tp=2, prefill_tp=2, page_size=PAGE,
        kv_memory_bytes="64KiB", kv_transfer="grpc", prefill_chunk=16, timeout_s=10.0,
    )  # fmt: skip
    with Target(pool) as target:
        yield target


@pytest.fixture
def single(
    make_pool: Callable[..., Any], random_checkpoint: Callable[..., Path]
) -> Iterator[Target]:
    pool = make_pool(
        random_checkpoint(max_position=64), nodes=1, page_size=PAGE, kv_memory_bytes="64KiB",
        kv_transfer="grpc", prefill_chunk=16, timeout_s=10.0,
    )  # fmt: skip
    with Target(pool) as target:
        yield target
