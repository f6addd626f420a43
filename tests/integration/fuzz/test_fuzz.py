"""Every field of every message, against the real services of a pool whose every part has two ranks.

Whatever comes of it: each call ends with a status that some code chose (INTERNAL, UNKNOWN and a
deadline are bugs), and the pool serves on, with its tokens and its pages as they were. One file,
since one pool serves all of it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tknp.engine.batch import Batch
from tknp.errors import TknpError
from tknp.prefill.follower import follow
from tknp.rpc.convert import delta_from
from tknp.rpc.ids import pack_ids
from tknp.v1 import common_pb2
from tknp.v1.attention_owner_pb2 import ReleaseRequest, ReserveRequest
from tknp.v1.common_pb2 import RequestKey, Sampling
from tknp.v1.inference_pb2 import GenerateRequest
from tknp.v1.prefill_pb2 import PrefillRequest

EPOCH = 1
KEY = RequestKey(request_id="fuzz", attempt=3)
CHOSEN = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNAVAILABLE,
}

fuzz = settings(
    max_examples=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def ends_well(code: Any, details: str, path: str) -> None:
    assert code in CHOSEN, f"{path}: {code}: {details}"


@fuzz
@given(data=st.data())
def test_whatever_is_sent_is_answered(path: str, target: Any, data: st.DataObject) -> None:
    service = path.split("/")[1].rpartition(".")[2]
    requests: list[Message] = []
    try:
        known = target.templates(target.reserved())[target.methods[path].input_type.name]
        count = data.draw(st.integers(1, 3)) if target.methods[path].client_streaming else 1
        requests += [
            data.draw(target.mutated(data.draw(st.sampled_from(known)))) for _ in range(count)
        ]
        address = data.draw(st.sampled_from(target.addresses(service)))
        code, _, details = target.call(address, path, *requests)
        ends_well(code, details, path)
    finally:
        target.clean(*requests)


def test_the_templates_are_accepted(target: Any) -> None:
    """So that what the fuzz sends fails for what was changed."""
    for path, method in target.methods.items():
        service, name = path.split("/")[1].rpartition(".")[2], path.rpartition("/")[2]
        if name in ("Run", "Follow") and service != "Prefill":
            continue  # the pool's own streams hold them
        for index in range(len(target.templates(target.reserved())[method.input_type.name])):
            target.clean()
            request = target.templates(target.reserved())[method.input_type.name][index]
            states = {"Complete": ["Begin"], "Write": ["Begin"], "Extend": ["Begin", "Complete"]}
            transfer = target.templates([common_pb2.Placement()])["TransferRequest"][0]
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
def test_transfers_in_any_order(target: Any, data: st.DataObject) -> None:
    """Life cycles of one holding, with calls left out, repeated, in another order, and mutated."""
    calls = ["Begin", "Renew", "Write", "Write", "Complete", "Extend", "Abort", "Release"]
    sent: list[Message] = []
    try:
        known = target.templates(target.reserved())
        for name in ["Begin", *data.draw(st.lists(st.sampled_from(calls), max_size=8))]:
            path = f"/tknp.v1.AttentionOwner/{name}"
            template = known[target.methods[path].input_type.name][0]
            sent.append(data.draw(st.just(template) | target.mutated(template)))
            rank = 1 if name == "Write" and data.draw(st.booleans()) else 0
            code, _, details = target.owner(name, sent[-1], t=rank)
            ends_well(code, details, path)
    finally:
        target.clean(*sent)


@settings(fuzz, max_examples=100)
@given(data=st.data())
def test_no_step_message_breaks_the_decoder(target: Any, data: st.DataObject) -> None:
    """A step that is not refused is one whose rows are numbered within the pool."""
    known = target.templates([common_pb2.Placement()])["Step"][0]
    batch = Batch(EPOCH, target.layout, max_rows=4)
    for _ in range(3):
        known.step = batch.next_step
        message = data.draw(target.mutated(known))
        before = (dict(batch.rows), batch.next_step)
        try:
            batch.apply(delta_from(message))
        except TknpError:
            assert (batch.rows, batch.next_step) == before
        assert all(0 <= slot < 4 and set(row.owners) <= {0, 1} for slot, row in batch.rows.items())
        assert sorted(batch.order) == sorted(batch.rows)


@settings(fuzz, max_examples=100)
@given(body=st.binary(max_size=60), data=st.data())
def test_bytes_that_are_no_message_are_refused(
    target: Any, body: bytes, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(list(target.methods)))
    method, service = target.methods[path], path.split("/")[1].rpartition(".")[2]
    code, _, details = target.call(target.addresses(service)[0], path, body)
    try:
        method.input_type._concrete_class.FromString(body)
    except DecodeError:
        busy = path.endswith(("Run", "Follow"))  # refused before a message is read
        assert code is grpc.StatusCode.INVALID_ARGUMENT or busy
    ends_well(code, details, path)


def test_the_pool_is_as_it_was(target: Any) -> None:
    """Last: nothing above has cost a page, a window or a token."""
    target.clean()
    target.check()


@pytest.mark.parametrize("lease_s", [0.0, -1.0, 3600.5, float("nan"), float("inf"), -float("inf")])
def test_no_lease_is_for_ever(target: Any, lease_s: float) -> None:
    message = ReserveRequest(key=KEY, epoch=EPOCH, tokens=1, lease_s=lease_s)
    code, _, details = target.owner("Reserve", message)
    assert (code, details[:7]) == (grpc.StatusCode.INVALID_ARGUMENT, "lease_s")


@pytest.mark.parametrize("tokens", [0, 2**31, 2**32 - 1])
def test_no_node_reserves_what_it_can_never_hold(target: Any, tokens: int) -> None:
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
    target: Any, changes: dict[str, Any], complaint: str
) -> None:
    """Each of these would wait for room that never comes, or end a rank within a collective."""
    request = target.templates(target.reserved())["PrefillRequest"][0]
    for name, value in changes.items():
        request.ClearField(name)
        request.MergeFrom(PrefillRequest(**{name: value}))
    code, _, details = target.call(
        target.config.prefill[0].addresses[0], "/tknp.v1.Prefill/Run", request
    )
    target.clean()
    assert (code, details[: len(complaint)]) == (grpc.StatusCode.INVALID_ARGUMENT, complaint)


def test_kv_that_no_owner_keeps_is_not_called_delivered(target: Any) -> None:
    placements = target.reserved()
    request = target.templates(placements)["PrefillRequest"][0]
    for placement in request.placements:
        placement.token_stop = 3
    code, _, details = target.call(
        target.config.prefill[0].addresses[0], "/tknp.v1.Prefill/Run", request
    )
    target.clean()
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "no owner keeps every head of tokens" in details


def test_the_streams_of_a_pool_are_taken(target: Any) -> None:
    """Steps and chunks of anybody but the coordinator and TP rank 0 are refused."""
    known = target.templates([common_pb2.Placement()])
    for node in target.config.nodes:
        for address in node.addresses:
            code, _, details = target.call(address, "/tknp.v1.DecodeRoot/Run", known["Step"][0])
            assert code is grpc.StatusCode.FAILED_PRECONDITION
            assert "another coordinator" in details
    follower = target.config.prefill[0].addresses[1]
    code, _, details = target.call(follower, "/tknp.v1.Prefill/Follow", known["PrefillChunk"][0])
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "TP rank 0" in details


def test_a_running_request_keeps_its_pages(target: Any) -> None:
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


def test_the_pool_is_still_as_it_was(target: Any) -> None:
    target.check()


def test_chunks_in_any_form(single: Any) -> None:
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
            known = single.templates(single.reserved())
            assert single.owner("Begin", known["TransferRequest"][0])[0] is grpc.StatusCode.OK
            template = known["PrefillChunk"][0]
            for sequence in range(data.draw(st.integers(1, 4))):
                chunks.append(data.draw(single.mutated(template)))
                chunks[-1].sequence = sequence
            assert sorted(single.ask(feed())) == list(range(len(chunks)))
        finally:
            single.clean(*chunks)

    run()
    single.check()
