"""Chunks land where they say, and misfits are refused before a byte is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tknp.errors import InvalidValue, ProtocolError
from tknp.kv.storage import KvStorage
from tknp.transfer.factory import make_receiver
from tknp.transfer.receiver import Receiver
from tknp.transfer.windows import WriteWindows
from tknp.v1.attention_owner_pb2 import KvChunk
from tknp.v1.common_pb2 import RequestKey

KEY = RequestKey(request_id="r", attempt=3)
PAGES, HEADS, PAGE, DIM = 8, 3, 4, 6


@pytest.fixture
def receiver() -> Receiver:
    storage = KvStorage(2, PAGES, HEADS, PAGE, DIM, torch.bfloat16)
    storage.data.fill_(-7)
    windows = WriteWindows()
    windows.open(KEY, "w", [2, 5, 6, 77])
    return make_receiver("grpc", storage, range(10, 12), range(6, 9), windows)


def chunk(**changes: Any) -> tuple[KvChunk, torch.Tensor]:
    """Two whole pages and two slots of a third of heads 7 and 8, and their rows."""
    rows = torch.randn(10, 2, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    pages = [rows[:4], rows[4:8], rows[8:]]
    data = b"".join(
        page.transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes() for page in pages
    )
    fields: dict[str, Any] = {
        "key": KEY, "writer": "w", "layer": 11, "values": True, "head_start": 7, "head_stop": 9,
        "pages": [5, 2, 6], "slots": 2, "data": data,
    }  # fmt: skip
    return KvChunk(**(fields | changes)), rows


def test_a_chunk_lands_in_its_slots_and_nowhere_else(receiver: Receiver) -> None:
    message, rows = chunk()
    assert receiver.apply(message) == 10 * 2 * DIM * 2
    want = torch.full_like(receiver.storage.data, -7)
    for token, row in enumerate(rows):
        want[1, 1, [5, 2, 6][token // PAGE], 1:, token % PAGE] = row
    assert torch.equal(receiver.storage.data, want)


def test_a_chunk_of_whole_pages_only(receiver: Receiver) -> None:
    message, rows = chunk(pages=[5, 2], slots=4, values=False)
    message.data = message.data[: 8 * 2 * DIM * 2]
    receiver.apply(message)
    assert torch.equal(receiver.storage.data[1, 0, 2, 1:], rows[4:8].transpose(0, 1))
    assert (receiver.storage.data[1, 1] == -7).all()


def test_a_chunk_that_begins_and_ends_inside_pages(receiver: Receiver) -> None:
    """Slots before the first and after the last keep what they had."""
    message, rows = chunk(first_slot=3, pages=[5, 2])
    parts = rows[0:1], rows[1:3]
    message.data = b"".join(
        part.transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes() for part in parts
    )
    receiver.apply(message)
    want = torch.full_like(receiver.storage.data, -7)
    want[1, 1, 5, 1:, 3] = rows[0]
    want[1, 1, 2, 1:, :2] = rows[1:3].transpose(0, 1)
    assert torch.equal(receiver.storage.data, want)


def test_a_chunk_within_one_page(receiver: Receiver) -> None:
    message, rows = chunk(first_slot=1, slots=3, pages=[6])
    message.data = rows[:2].transpose(0, 1).contiguous().view(torch.uint8).numpy().tobytes()
    receiver.apply(message)
    want = torch.full_like(receiver.storage.data, -7)
    want[1, 1, 6, 1:, 1:3] = rows[:2].transpose(0, 1)
    assert torch.equal(receiver.storage.data, want)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"writer": "x"}, "no open transfer"),
        ({"pages": [5, 2, 3]}, "page 3"),
        ({"layer": 12}, r"KvChunk.layer=12: this rank takes layers \[10, 12\)"),
        ({"layer": 9}, r"KvChunk.layer=9"),
        ({"head_start": 5}, r"KvChunk.head_start=\[5, 9\): this rank takes KV heads \[6, 9\)"),
        ({"head_stop": 10}, r"KvChunk.head_start=\[7, 10\)"),
        ({"head_stop": 7}, r"KvChunk.head_start=\[7, 7\)"),
        ({"pages": []}, "KvChunk.pages=0"),
        ({"pages": [5, 2, 77]}, "KvChunk.pages=77: this rank takes page ids below 8"),
        ({"slots": 0}, "KvChunk.slots=0"),
        ({"slots": 5}, "KvChunk.slots=5"),
        ({"first_slot": 4}, "KvChunk.first_slot=4: this rank takes slots below 4"),
        ({"first_slot": 2, "pages": [5]}, "KvChunk.first_slot=2: this rank takes slots below 2"),
        ({"first_slot": 1}, "KvChunk.data=240: this rank takes 216 bytes"),
        ({"slots": 3}, "KvChunk.data=240: this rank takes 264 bytes"),
        ({"data": b""}, "KvChunk.data=0"),
    ],
)
def test_misfits_are_refused(receiver: Receiver, changes: dict[str, Any], message: str) -> None:
    bad, _ = chunk(**changes)
    with pytest.raises(ProtocolError, match=message):
        receiver.apply(bad)
    assert (receiver.storage.data == -7).all()


def test_without_nixl_nothing_is_published(receiver: Receiver) -> None:
    assert receiver.kind == "grpc"
    assert receiver.nixl_metadata == b""
    assert receiver.nixl_address == 0
    receiver.close()


def test_a_storage_that_is_not_the_ranks_is_refused() -> None:
    storage = KvStorage(2, PAGES, HEADS, PAGE, DIM, torch.float32)
    with pytest.raises(InvalidValue, match=r"storage\.kv_heads=3: must be 2"):
        make_receiver("grpc", storage, range(2), range(2), WriteWindows())
