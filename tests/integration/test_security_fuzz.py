"""Every field of every message, against the real services of a pool whose every part has two ranks.

A template that would be accepted is taken, and any of its fields, however deep, is dropped or
replaced by another value of its type. Whatever comes of it: each call ends with a status that some
code chose (INTERNAL, UNKNOWN and a deadline are bugs), and the pool serves on, with its tokens and
its pages as they were. One file, since one pool serves all of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tknp.engine.batch import Batch
from tknp.errors import TknpError
from tknp.local import InProcessPool
from tknp.prefill.follower import follow
from tknp.rpc.convert import delta_from
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
CHOSEN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}
CALL_S = 20.0
MODULES = (attention_owner_pb2, coordinator_pb2, decode_root_pb2, inference_pb2, prefill_pb2)
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}

fuzz = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


# --- values of every type ----------------------------------------------------------------------


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


# --- a pool on its own thread ------------------------------------------------------------------


class Target:
    """A running pool and what of it tests reach; calls are synchronous, one channel an address."""

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


def templates(target: Target, pages: list[common_pb2.Placement]) -> dict[str, list[Message]]:
    """What each method would accept, by the name of its request."""
    ids, sampling = pack_ids(PROMPT), Sampling(max_tokens=3, seed=1)
    owners = [target.config.nodes[0].addresses[p.tp_rank] for p in pages]
    turns = Chat(messages=[ChatMessage(role="user", content="hello")])
    transfer = TransferRequest(
        key=KEY, epoch=EPOCH, writer=WRITER, lease_s=30, compatibility=target.compatibility
    )
    admit = step_pb2.Admit(
        slot=1, key=KEY, owners=[1, 0], position=5, token=9, sampling=sampling, generated_count=1,
        prompt_token_ids=ids, generated_token_ids=pack_ids([9]), pages=[1],
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
            key=KEY, epoch=EPOCH, token_ids=ids, sampling=sampling, placements=pages, owners=owners
        ),
        chunk,
        PrepareRequest(json_schema='{"type": "object"}'),
    ]  # fmt: skip
    result: dict[str, list[Message]] = {}
    for message in found:
        result.setdefault(message.DESCRIPTOR.name, []).append(message)
    return result


def ends_well(code: Any, details: str, path: str) -> None:
    assert code in CHOSEN, f"{path}: {code}: {details}"


@pytest.mark.parametrize("path", METHODS, ids=lambda path: path.split(".")[-1])
@fuzz
@given(data=st.data())
def test_whatever_is_sent_is_answered(path: str, target: Target, data: st.DataObject) -> None:
    service = path.split("/")[1].rpartition(".")[2]
    requests: list[Message] = []
    try:
        known = templates(target, target.reserved())[METHODS[path].input_type.name]
        count = data.draw(st.integers(1, 3)) if METHODS[path].client_streaming else 1
        requests += [data.draw(mutated(data.draw(st.sampled_from(known)))) for _ in range(count)]
        address = data.draw(st.sampled_from(target.addresses(service)))
        code, _, details = target.call(address, path, *requests)
        ends_well(code, details, path)
    finally:
        target.clean(*requests)


def test_the_templates_are_accepted(target: Target) -> None:
    """So that what the fuzz sends fails for what was changed."""
    for path, method in METHODS.items():
        service, name = path.split("/")[1].rpartition(".")[2], path.rpartition("/")[2]
        if name in ("Run", "Follow") and service != "Prefill":
            continue  # the pool's own streams hold them
        for index in range(len(templates(target, target.reserved())[method.input_type.name])):
            target.clean()
            request = templates(target, target.reserved())[method.input_type.name][index]
            states = {"Complete": ["Begin"], "Write": ["Begin"], "Extend": ["Begin", "Complete"]}
            transfer = templates(target, [common_pb2.Placement()])["TransferRequest"][0]
            for before in states.get(name, []):
                assert target.owner(before, transfer)[0] is grpc.StatusCode.OK
            code, _, details = target.call(target.addresses(service)[0], path, request)
            if name == "Follow":
                assert code is grpc.StatusCode.UNAVAILABLE  # asked of TP rank 0
            else:
                assert code is grpc.StatusCode.OK, f"{path}: {details}"
            target.clean(request)
    target.check()


@settings(fuzz, max_examples=40)
@given(data=st.data())
def test_transfers_in_any_order(target: Target, data: st.DataObject) -> None:
    """Life cycles of one holding, with calls left out, repeated, in another order, and mutated."""
    calls = ["Begin", "Renew", "Write", "Write", "Complete", "Extend", "Abort", "Release"]
    sent: list[Message] = []
    try:
        known = templates(target, target.reserved())
        for name in ["Begin", *data.draw(st.lists(st.sampled_from(calls), max_size=8))]:
            path = f"/tknp.v1.AttentionOwner/{name}"
            template = known[METHODS[path].input_type.name][0]
            sent.append(data.draw(st.just(template) | mutated(template)))
            rank = 1 if name == "Write" and data.draw(st.booleans()) else 0
            code, _, details = target.owner(name, sent[-1], t=rank)
            ends_well(code, details, path)
    finally:
        target.clean(*sent)


@settings(fuzz, max_examples=100)
@given(data=st.data())
def test_no_step_message_breaks_the_decoder(target: Target, data: st.DataObject) -> None:
    """A step that is not refused is one whose rows are numbered within the pool."""
    known = templates(target, [common_pb2.Placement()])["Step"][0]
    batch = Batch(EPOCH, target.layout, max_rows=4)
    for _ in range(3):
        known.step = batch.next_step
        message = data.draw(mutated(known))
        before = (dict(batch.rows), batch.next_step)
        try:
            batch.apply(delta_from(message))
        except TknpError:
            assert (batch.rows, batch.next_step) == before
        assert all(0 <= slot < 4 and set(row.owners) <= {0, 1} for slot, row in batch.rows.items())
        assert sorted(batch.order) == sorted(batch.rows)


@settings(fuzz, max_examples=100)
@given(body=st.binary(max_size=60), path=st.sampled_from(list(METHODS)))
def test_bytes_that_are_no_message_are_refused(target: Target, body: bytes, path: str) -> None:
    method, service = METHODS[path], path.split("/")[1].rpartition(".")[2]
    code, _, details = target.call(target.addresses(service)[0], path, body)
    try:
        method.input_type._concrete_class.FromString(body)
    except DecodeError:
        busy = path.endswith(("Run", "Follow"))  # refused before a message is read
        assert code is grpc.StatusCode.INVALID_ARGUMENT or busy
    ends_well(code, details, path)


def test_the_pool_is_as_it_was(target: Target) -> None:
    """Last: nothing above has cost a page, a window or a token."""
    target.clean()
    target.check()


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 3600.5, float("nan"), float("inf"), -float("inf")])
def test_no_lease_is_for_ever(target: Target, lease_s: float) -> None:
    message = ReserveRequest(key=KEY, epoch=EPOCH, tokens=1, lease_s=lease_s)
    code, _, details = target.owner("Reserve", message)
    assert (code, details[:7]) == (grpc.StatusCode.INVALID_ARGUMENT, "lease_s")


@pytest.mark.parametrize("tokens", [0, 2**31, 2**32 - 1])
def test_no_node_reserves_what_it_can_never_hold(target: Target, tokens: int) -> None:
    message = ReserveRequest(key=KEY, epoch=EPOCH, tokens=tokens, lease_s=30)
    code, _, details = target.owner("Reserve", message)
    assert (code, details[:6]) == (grpc.StatusCode.INVALID_ARGUMENT, "tokens")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": b""}, "token_ids='0 ids'"),
        ({"token_ids": pack_ids([7] * 65)}, "token_ids='65 ids'"),
        ({"token_ids": pack_ids([2**32 - 1])}, "token_ids=4294967295"),
        ({"token_ids": b"123"}, "token_ids='3 bytes'"),
        ({"generated": 5}, "generated=5"),
        ({"owners": ["127.0.0.1:1"]}, "owners=1"),
        ({"owners": ["here", "there"]}, "owners='here'"),
        ({"sampling": Sampling(top_p=float("nan"))}, "top_p=nan"),
        ({"sampling": Sampling(logit_bias={2**32 - 1: 1.0})}, "logit_bias=4294967295"),
        ({"key": RequestKey(request_id="a" * 129)}, "key.request_id='129 characters'"),
        ({"key": RequestKey(request_id="a\nb")}, "key.request_id='3 characters'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_prompt_that_would_break_a_replica_is_refused(
    target: Target, changes: dict[str, Any], complaint: str
) -> None:
    """Each of these would wait for room that never comes, or end a rank within a collective."""
    request = templates(target, target.reserved())["PrefillRequest"][0]
    for name, value in changes.items():
        request.ClearField(name)
        request.MergeFrom(PrefillRequest(**{name: value}))
    code, _, details = target.call(
        target.config.prefill[0].addresses[0], "/tknp.v1.Prefill/Run", request
    )
    target.clean()
    assert (code, details[: len(complaint)]) == (grpc.StatusCode.INVALID_ARGUMENT, complaint)


def test_kv_that_no_owner_keeps_is_not_called_delivered(target: Target) -> None:
    placements = target.reserved()
    request = templates(target, placements)["PrefillRequest"][0]
    for placement in request.placements:
        placement.token_stop = 3
    code, _, details = target.call(
        target.config.prefill[0].addresses[0], "/tknp.v1.Prefill/Run", request
    )
    target.clean()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "no owner keeps every head of tokens" in details


def test_the_streams_of_a_pool_are_taken(target: Target) -> None:
    """Steps and chunks of anybody but the coordinator and TP rank 0 are refused."""
    known = templates(target, [common_pb2.Placement()])
    for node in target.config.nodes:
        for address in node.addresses:
            code, _, details = target.call(address, "/tknp.v1.DecodeRoot/Run", known["Step"][0])
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "another coordinator" in details
    follower = target.config.prefill[0].addresses[1]
    code, _, details = target.call(follower, "/tknp.v1.Prefill/Follow", known["PrefillChunk"][0])
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "TP rank 0" in details


def test_a_running_request_keeps_its_pages(target: Target) -> None:
    """A Release that comes too late must not hand pages that steps write to another request."""
    ids = pack_ids([3] * 17)
    long = GenerateRequest(token_ids=ids, sampling=Sampling(max_tokens=45, ignore_eos=True))

    async def admitted() -> tuple[int, Any]:
        while True:
            for node in target.running.nodes:
                books = node.runtime.books
                for holding in books.holdings() if books is not None else ():
                    if holding.admitted:
                        return node.runtime.rank.node, holding.key
            await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as pool:
        path = "/tknp.v1.Inference/Generate"
        running = pool.submit(target.call, target.config.coordinator, path, long)
        node, key = target.ask(admitted())
        message = ReleaseRequest(
            key=RequestKey(request_id=key.request_id, attempt=key.attempt), epoch=EPOCH
        )
        code, _, details = target.owner("Release", message, node)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "is in the running batch" in details
        assert running.result()[0] is grpc.StatusCode.OK


def test_the_pool_is_still_as_it_was(target: Target) -> None:
    target.check()


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


def test_chunks_in_any_form(single: Target) -> None:
    """What TP rank 0 tells the other ranks of a replica, taken by a rank that stands alone."""
    runtime = single.running.prefill[0].runtime

    @settings(fuzz, max_examples=40)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        chunks: list[Any] = []

        async def feed() -> list[int]:
            """Sequence numbers of the answers; the stream stays open until all have come."""
            requests, answered, over = runtime.requests, [], asyncio.Event()
            assert requests is not None

            async def stream() -> Any:
                for chunk in chunks:
                    yield chunk
                await over.wait()

            async for done in follow(requests, single.vocab_size, stream(), lambda _: None):
                answered.append(done.sequence)
                if len(answered) == len(chunks):
                    over.set()
            await requests.close()
            return answered

        try:
            known = templates(single, single.reserved())
            assert single.owner("Begin", known["TransferRequest"][0])[0] is grpc.StatusCode.OK
            template = known["PrefillChunk"][0]
            for sequence in range(data.draw(st.integers(1, 4))):
                chunks.append(data.draw(mutated(template)))
                chunks[-1].sequence = sequence
            assert sorted(single.ask(feed())) == list(range(len(chunks)))
        finally:
            single.clean(*chunks)

    run()
    single.check()
