from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tknp.errors import ProtocolError
from tknp.transport.ring import LINE, PREFIX_BYTES, Part, Ring


def both_ends(capacity: int) -> tuple[Ring, Ring]:
    memory = mmap.mmap(-1, PREFIX_BYTES + capacity)
    return Ring(memory, 0, capacity), Ring(memory, 0, capacity)


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    lines=st.integers(2, 9),
    moves=st.lists(st.booleans(), max_size=60),
)
def test_messages_of_any_size_arrive_whole_in_any_interleaving(
    sizes: list[int], lines: int, moves: list[bool]
) -> None:
    writer, reader = both_ends(lines * LINE)
    sent = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    got = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    out, into = [Part(t) for t in sent], [Part(t) for t in got]
    # After the drawn moves both ends take turns; each pair of turns moves at least one byte.
    turns = moves + [True, False] * sum(sizes)
    for write in turns:
        if write and out and writer.push(out[0]):
            out.pop(0)
        elif not write and into and reader.pull(into[0]):
            into.pop(0)
    assert not out
    assert not into
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_a_full_ring_takes_no_header() -> None:
    writer, reader = both_ends(2 * LINE)
    first, second = Part(torch.ones(LINE, dtype=torch.uint8)), Part(torch.ones(1))
    assert writer.push(first)
    assert not writer.push(second)
    assert second.moved == -1
    assert reader.pull(Part(torch.zeros(LINE, dtype=torch.uint8)))
    assert writer.push(second)


def test_an_empty_ring_gives_nothing() -> None:
    _, reader = both_ends(2 * LINE)
    part = Part(torch.zeros(1))
    assert not reader.pull(part)
    assert part.moved == -1


@pytest.mark.parametrize("expected", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
def test_another_size_or_dtype_is_a_protocol_error(expected: torch.Tensor) -> None:
    writer, reader = both_ends(4 * LINE)
    writer.push(Part(torch.zeros(2)))
    with pytest.raises(ProtocolError, match=r"8 bytes of torch\.float32"):
        reader.pull(Part(expected))


def test_a_message_out_of_sequence_is_a_protocol_error() -> None:
    memory = mmap.mmap(-1, PREFIX_BYTES + 4 * LINE)
    Ring(memory, 0, 4 * LINE).push(Part(torch.zeros(2)))
    late = Ring(memory, 0, 4 * LINE)
    late._messages = 5
    with pytest.raises(ProtocolError, match=r"message 0 .* expected message 5"):
        late.pull(Part(torch.zeros(2)))
