"""One contract for lanes of both kinds, and for a ring with one at each end."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import ProtocolError
from tknp.kernels.library import available
from tknp.kernels.mailbox import NativeLane
from tknp.layout.rank import Rank
from tknp.transport.lane import Lane, LaneFactory, PythonLane, Wire
from tknp.transport.ring import LINE, PREFIX_BYTES
from tknp.transport.segment import HEADER_BYTES, LOST_OFFSET

A, B = Rank(0, 0), Rank(1, 0)
KINDS: dict[str, LaneFactory] = {"python": PythonLane, "native": NativeLane}


class Pair:
    """Two ranks whose segments hold a ring each."""

    def __init__(self, kinds: tuple[str, str], capacity: int) -> None:
        size = HEADER_BYTES + PREFIX_BYTES + capacity
        self.memory = {rank: mmap.mmap(-1, size) for rank in (A, B)}

        def lane(kind: str, own: Rank, peer: Rank) -> Lane:
            wires = [
                Wire(peer, sends, self.memory[at], HEADER_BYTES, capacity, self.memory[peer])
                for sends, at in ((True, peer), (False, own))
            ]
            return KINDS[kind](wires, self.memory[own])

        self.a, self.b = lane(kinds[0], A, B), lane(kinds[1], B, A)

    def lose(self, rank: Rank) -> None:
        self.memory[rank][LOST_OFFSET] = 1


@pytest.fixture(params=list(product(KINDS, KINDS)), ids="-".join)
def kinds(request: pytest.FixtureRequest) -> tuple[str, str]:
    pair: tuple[str, str] = request.param
    status = available()
    if "native" in pair and not status:
        pytest.skip(status.reason)
    return pair


@pytest.fixture
def join(kinds: tuple[str, str]) -> Callable[[int], Pair]:
    return lambda lines: Pair(kinds, lines * LINE)


def far_ns() -> int:
    """Later than any of these waits takes."""
    return time.monotonic_ns() + 60 * 10**9


@settings(max_examples=25, deadline=None)
@given(
    pair=st.sampled_from(list(product(KINDS, KINDS))),
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    lines=st.integers(2, 9),
    moves=st.lists(st.integers(0, 3), max_size=60),
)
def test_messages_of_any_size_arrive_whole_in_any_interleaving(
    pair: tuple[str, str], sizes: list[int], lines: int, moves: list[int]
) -> None:
    if "native" in pair and not available():
        pair = ("python", "python")
    ends = Pair(pair, lines * LINE)
    sent = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in sizes]
    got = [torch.zeros(n, dtype=torch.uint8) for n in sizes]
    writing, reading = list(sent), list(got)
    out = into = (0, 0)
    # After the drawn moves everything is posted and both ends take turns.
    turns = moves + [0, 1] * len(sizes) + [2, 3] * sum(sizes)
    for turn in turns:
        if turn == 0 and writing:
            out = ends.a.post([(B, writing.pop(0))], [])
        elif turn == 1 and reading:
            into = ends.b.post([], [(A, reading.pop(0))])
        elif turn == 2:
            ends.a.done(*out)
        elif turn == 3:
            ends.b.done(*into)
    assert ends.a.done(0, out[1])
    assert ends.b.done(0, into[1])
    assert all(torch.equal(a, b) for a, b in zip(sent, got, strict=True))


def test_a_message_that_fits_is_sent_when_it_is_posted(join: Callable[[int], Pair]) -> None:
    pair, rows, got = join(4), torch.ones(3), torch.zeros(3)
    sent = pair.a.post([(B, rows)], [])
    rows.fill_(2)
    assert pair.a.missing(*sent) == []
    assert pair.b.done(*pair.b.post([], [(A, got)]))
    assert got.tolist() == [1.0] * 3


def test_what_is_missing_is_named_by_peer_and_direction(join: Callable[[int], Pair]) -> None:
    pair = join(2)
    messages = pair.a.post([(B, torch.ones(2 * LINE))], [(B, torch.zeros(1))])
    assert not pair.a.done(*messages)
    assert pair.a.missing(*messages) == [(B, True), (B, False)]


def test_many_exchanges_are_under_way_and_asked_about_last_first(
    join: Callable[[int], Pair],
) -> None:
    pair, got = join(4), [torch.zeros(50) for _ in range(200)]
    into = [pair.b.post([], [(A, tensor)]) for tensor in got]
    for i in range(200):
        out = pair.a.post([(B, torch.full((50,), float(i)))], [])
        while not pair.a.done(*out):
            pair.b.done(*into[i])
    assert all(pair.b.done(*messages) for messages in reversed(into))
    assert [int(tensor[0]) for tensor in got] == list(range(200))


def test_room_is_made_among_messages_that_others_wait_behind(
    join: Callable[[int], Pair],
) -> None:
    """Receives are under way all the time, while more sends than there is room for go through."""
    pair, late = join(4), torch.zeros(1)
    waiting = pair.a.post([], [(B, late)])
    for i in range(150):
        sent = pair.a.post([(B, torch.full((20,), float(i)))], [])
        got = torch.zeros(20)
        assert pair.a.missing(*sent) == []
        assert pair.b.done(*pair.b.post([], [(A, got)]))
        assert got.tolist() == [i] * 20
    assert not pair.a.done(*waiting)
    pair.b.post([(A, torch.ones(1))], [])
    assert pair.a.done(*waiting)
    assert late.tolist() == [1.0]


def test_a_wait_ends_with_the_message_or_the_time(join: Callable[[int], Pair]) -> None:
    pair, got = join(4), torch.zeros(2)
    messages = pair.b.post([], [(A, got)])
    now = time.monotonic_ns()
    assert not pair.b.wait(*messages, now, now)
    assert not pair.b.wait(*messages, now - 10**10, time.monotonic_ns() + 10**6)
    pair.a.post([(B, torch.ones(2))], [])
    assert pair.b.wait(*messages, now, far_ns())
    assert pair.b.wait(*messages, now, now)
    assert got.tolist() == [1.0] * 2


@pytest.mark.parametrize("lost", [A, B])
def test_a_compiled_wait_ends_when_a_rank_is_lost(lost: Rank) -> None:
    status = available()
    if not status:
        pytest.skip(status.reason)
    pair = Pair(("native", "native"), 4 * LINE)
    messages = pair.b.post([], [(A, torch.zeros(2))])
    pair.lose(lost)
    assert not pair.b.wait(*messages, time.monotonic_ns(), far_ns())


@pytest.mark.parametrize("expected", [torch.zeros(3), torch.zeros(2, dtype=torch.int32)])
def test_another_size_or_dtype_is_a_protocol_error(
    join: Callable[[int], Pair], expected: torch.Tensor
) -> None:
    pair = join(4)
    pair.a.post([(B, torch.zeros(2))], [])
    messages = pair.b.post([], [(A, expected)])
    pair.b.post([(A, torch.zeros(1))], [])  # found by who asks, not by who posts
    for _ in range(2):
        with pytest.raises(ProtocolError, match=r"8 bytes of torch\.float32, expected message 0"):
            pair.b.done(*messages)
    with pytest.raises(ProtocolError, match=r"8 bytes of torch\.float32"):
        pair.b.wait(*messages, 0, far_ns())


def test_a_message_out_of_sequence_is_a_protocol_error(join: Callable[[int], Pair]) -> None:
    pair = join(4)
    pair.a.post([(B, torch.zeros(2))], [])
    ring = memoryview(pair.memory[B])[HEADER_BYTES + PREFIX_BYTES :].cast("Q")
    ring[0] = 5
    messages = pair.b.post([], [(A, torch.zeros(2))])
    with pytest.raises(ProtocolError, match=r"message 5 .* expected message 0"):
        pair.b.done(*messages)
