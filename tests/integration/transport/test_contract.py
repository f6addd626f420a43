"""One contract for every transport: each case runs on all ranks of a small pool.

Cases stand beside what runs them, as a process of the pool finds them by file and name.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tknp.errors import DeadlineExceeded, InvalidValue, Unavailable
from tknp.layout.rank import Rank
from tknp.transport.base import Transport, Work

Connect = Callable[..., Any]
PROCESSES = ("gloo", "shared_memory", "shared_memory_in_python")


def nodes_of_three(rank: Rank) -> list[Rank]:
    return [Rank(n, 0) for n in range(3) if n != rank.node]


def rows(source: Rank, target: Rank, dtype: torch.dtype) -> torch.Tensor:
    """What `source` sends to `target`: another number of rows for each pair."""
    count = 1 + 2 * source.node + target.node
    return (torch.arange(count * 5).view(count, 5) + 100 * source.node).to(dtype)


def uneven_rows_of_every_dtype(wire: Transport) -> None:
    peers = nodes_of_three(wire.rank)
    sends, recvs = [], []
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        sends += [(p, rows(wire.rank, p, dtype)) for p in peers]
        recvs += [(p, torch.zeros_like(rows(p, wire.rank, dtype))) for p in peers]
    wire.post(sends, recvs, stream=0).wait()
    for peer, got in recvs:
        assert torch.equal(got, rows(peer, wire.rank, got.dtype))


def empty_messages_are_skipped(wire: Transport) -> None:
    got = torch.zeros(2, 4)
    nothing = torch.zeros(0, 4)
    if wire.rank.node == 0:
        sends = [(Rank(1, 0), nothing), (Rank(1, 0), torch.ones(2, 4)), (Rank(2, 0), nothing)]
        wire.post(sends, [], stream=0).wait()
    elif wire.rank.node == 1:
        wire.post([], [(Rank(0, 0), nothing), (Rank(0, 0), got)], stream=0).wait()
        assert torch.equal(got, torch.ones(2, 4))
    else:
        wire.post([], [(Rank(0, 0), nothing)], stream=0).wait()


def row_slices_are_filled_in_place(wire: Transport) -> None:
    mine = torch.full((6, 8), float(wire.rank.node))
    got = torch.full((6, 8), -1.0)
    peers = nodes_of_three(wire.rank)
    recvs = [(p, got[1 + 2 * i : 3 + 2 * i]) for i, p in enumerate(peers)]
    wire.post([(p, mine[2:4]) for p in peers], recvs, stream=0).wait()
    column = [-1.0, *(float(p.node) for p in peers for _ in range(2)), -1.0]
    assert torch.equal(got, torch.tensor(column)[:, None].expand(6, 8))


def one_stream_keeps_its_order(wire: Transport) -> None:
    """Forty exchanges under way at once, waited for last first, sizes growing past 64 KiB."""
    peers = nodes_of_three(wire.rank)
    works, got = [], []
    for i in range(40):
        size = 1 + i * 500
        out = [(p, torch.full((size,), 100 * wire.rank.node + i)) for p in peers]
        into = [(p, torch.zeros(size, dtype=torch.int64)) for p in peers]
        works.append((wire.post(out, into, stream=0), out))
        got.append(into)
    for work, _ in reversed(works):
        work.wait()
        work.wait()
    for i, into in enumerate(got):
        for peer, tensor in into:
            assert torch.equal(tensor, torch.full_like(tensor, 100 * peer.node + i))


def streams_do_not_wait_for_each_other(wire: Transport) -> None:
    """Rank 1 sends on stream 1 only after its message on stream 2 was answered."""
    if wire.rank.node == 0:
        early, late = torch.zeros(3), torch.zeros(3)
        first = wire.post([], [(Rank(1, 0), late)], stream=1)
        wire.post([], [(Rank(1, 0), early)], stream=2).wait()
        wire.post([(Rank(1, 0), early + 1)], [], stream=2).wait()
        first.wait()
        assert early.tolist() == [2.0] * 3
        assert late.tolist() == [3.0] * 3
    elif wire.rank.node == 1:
        answer = torch.zeros(3)
        wire.post([(Rank(0, 0), torch.full((3,), 2.0))], [], stream=2).wait()
        wire.post([], [(Rank(0, 0), answer)], stream=2).wait()
        wire.post([(Rank(0, 0), answer)], [], stream=1).wait()


def streams_run_on_threads_of_their_own(wire: Transport) -> None:
    peers = nodes_of_three(wire.rank)

    def run(stream: int) -> None:
        for i in range(25):
            out = [(p, torch.full((40,), 1000 * stream + i)) for p in peers]
            into = [(p, torch.zeros(40, dtype=torch.int64)) for p in peers]
            wire.post(out, into, stream=stream).wait()
            assert all(torch.equal(t, out[0][1]) for _, t in into)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(run, range(3)))


def finish(work: Work) -> None:
    """Wait by polling; the exchange itself bounds how long that takes."""
    while not work.done():
        time.sleep(0)
    work.wait()


def one_thread_polls_streams_in_any_order(wire: Transport) -> None:
    """Each rank serves three streams in an order of its own, messages and sums in turn."""
    peers = nodes_of_three(wire.rank)

    def run(stream: int) -> Iterator[Work]:
        for i in range(12):
            size = 1 + 3000 * i
            out = [(p, torch.full((size,), 1000 * stream + i)) for p in peers]
            into = [(p, torch.zeros(size, dtype=torch.int64)) for p in peers]
            yield wire.post(out, into, stream=stream)
            assert all(torch.equal(t, out[0][1]) for _, t in into)
            total = torch.full((size,), 1.0 + stream)
            yield wire.all_reduce(total, stream=stream, scope="pool")
            assert torch.equal(total, torch.full((size,), 3.0 + 3 * stream))

    order = random.Random(wire.rank.node)
    lanes = {stream: run(stream) for stream in range(3)}
    pending = {stream: next(lane) for stream, lane in lanes.items()}
    while pending:
        stream = order.choice(list(pending))
        if pending[stream].done():
            pending[stream].wait()
            work = next(lanes[stream], None)
            if work is None:
                del pending[stream]
            else:
                pending[stream] = work


def an_exchange_under_way_is_not_done(wire: Transport) -> None:
    """Rank 1 sends only after rank 0 has found its receive under way."""
    if wire.rank.node == 0:
        got, other = torch.zeros(3), torch.zeros(1)
        work = wire.post([], [(Rank(1, 0), got)], stream=0)
        assert not work.done()
        wire.post([(Rank(1, 0), other)], [], stream=1).wait()
        finish(work)
        assert work.done()
        assert got.tolist() == [1.0] * 3
    elif wire.rank.node == 1:
        finish(wire.post([], [(Rank(0, 0), torch.zeros(1))], stream=1))
        finish(wire.post([(Rank(0, 0), torch.ones(3))], [], stream=0))


def both_ways_at_once_with_megabytes(wire: Transport) -> None:
    peers = nodes_of_three(wire.rank)
    size = 700_001
    out = [(p, torch.arange(size) * (1 + wire.rank.node)) for p in peers]
    into = [(p, torch.zeros(size, dtype=torch.int64)) for p in peers]
    wire.post(out, into, stream=0).wait()
    for peer, got in into:
        assert torch.equal(got, torch.arange(size) * (1 + peer.node))


def addend(t: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sum depends on the order: one rank's cancel those of another."""
    noise = torch.randn(size, generator=torch.Generator().manual_seed(t))
    return (noise + (3e7, 1.0, -3e7)[t]).to(dtype)


def all_reduce_sums_in_rank_order(wire: Transport) -> None:
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (1, 7, 1000, 70_000)):
        a, b, c = (addend(t, size, dtype).float() for t in range(3))
        assert size < 7 or not torch.equal((a + b) + c, (a + c) + b)
        tensor = addend(wire.rank.t, size, dtype)
        wire.all_reduce(tensor, stream=0).wait()
        assert torch.equal(tensor, ((a + b) + c).to(dtype))


def all_ranks_of_the_pool_sum_in_rank_order(wire: Transport) -> None:
    for dtype, size in itertools.product((torch.float32, torch.bfloat16), (1, 1000, 70_000)):
        a, b, c = (addend(n, size, dtype).float() for n in range(3))
        tensor = addend(wire.rank.node, size, dtype)
        wire.all_reduce(tensor, stream=0).wait()  # over this node's only rank
        assert torch.equal(tensor, addend(wire.rank.node, size, dtype))
        wire.all_reduce(tensor, stream=0, scope="pool").wait()
        assert torch.equal(tensor, ((a + b) + c).to(dtype))
    assert wire.sent_bytes.collective == 6 * 71_001
    assert wire.sent_bytes.cross_node == 0


def gather_takes_unequal_slices(wire: Transport) -> None:
    for widths in ((5, 3, 2), (0, 4, 0)):
        mine = torch.full((2, widths[wire.rank.t]), float(wire.rank.t))
        got = wire.gather(mine, widths, stream=0)
        if wire.rank.t == 0:
            assert got is not None
            assert [tuple(s.shape) for s in got] == [(2, w) for w in widths]
            assert all(bool((s == t).all()) for t, s in enumerate(got))
        else:
            assert got is None


def broadcast_fills_every_rank(wire: Transport) -> None:
    for size in (1, 100_000):
        tensor = torch.arange(size) if wire.rank.t == 0 else torch.zeros(size, dtype=torch.int64)
        wire.broadcast(tensor, stream=1)
        assert torch.equal(tensor, torch.arange(size))


def collectives_and_messages_share_a_stream(wire: Transport) -> None:
    """A receive still under way doesn't take the messages of a later collective."""
    up, down = (Rank(0, (wire.rank.t + d) % 3) for d in (1, -1))
    got = torch.zeros(4)
    work = wire.post([(up, torch.full((4,), 1.0 + wire.rank.t))], [(down, got)], stream=0)
    total = torch.ones(4)
    wire.all_reduce(total, stream=0).wait()
    work.wait()
    assert total.tolist() == [3.0] * 4
    assert got.tolist() == [1.0 + down.t] * 4


def bytes_are_counted_within_a_node(wire: Transport) -> None:
    up, down = (Rank(0, (wire.rank.t + d) % 3) for d in (1, -1))
    wire.post([(up, torch.zeros(6, 4))], [(down, torch.zeros(6, 4))], stream=0).wait()
    wire.all_reduce(torch.zeros(10), stream=0).wait()
    wire.broadcast(torch.zeros(5), stream=0)
    wire.gather(torch.zeros(2, 3, dtype=torch.bfloat16), (3, 3, 3), stream=0)
    root = wire.rank.t == 0
    assert wire.sent_bytes.node_local == 96
    assert wire.sent_bytes.cross_node == 0
    assert wire.sent_bytes.collective == 40 + (20 if root else 12)


def bytes_are_counted_between_nodes(wire: Transport) -> None:
    peers = nodes_of_three(wire.rank)
    out = [(p, torch.zeros(wire.rank.node, 4)) for p in peers]
    wire.post(out, [(p, torch.zeros(p.node, 4)) for p in peers], stream=0).wait()
    wire.all_reduce(torch.zeros(10), stream=0).wait()
    assert wire.sent_bytes.cross_node == 2 * 16 * wire.rank.node
    assert wire.sent_bytes.node_local == wire.sent_bytes.collective == 0


def what_cannot_be_sent_is_refused(wire: Transport) -> None:
    other = nodes_of_three(wire.rank)[0]
    with pytest.raises(InvalidValue, match="without a transport"):
        wire.post([(wire.rank, torch.zeros(1))], [], stream=0)
    with pytest.raises(InvalidValue, match="3 nodes of 1 ranks"):
        wire.post([], [(Rank(3, 0), torch.zeros(1))], stream=0)
    with pytest.raises(InvalidValue, match="contiguous"):
        wire.post([(other, torch.zeros(4, 4)[:, :2])], [], stream=0)
    assert wire.sent_bytes.cross_node == 0


def what_cannot_be_reduced_is_refused(wire: Transport) -> None:
    with pytest.raises(InvalidValue, match="float32"):
        wire.all_reduce(torch.zeros(4, dtype=torch.int64), stream=0)
    with pytest.raises(InvalidValue, match="widths"):
        wire.gather(torch.zeros(2, 4), (4, 4), stream=0)
    with pytest.raises(InvalidValue, match="contiguous"):
        wire.broadcast(torch.zeros(4, 4).T, stream=0)


def wait_for_silence(wire: Transport) -> None:
    """Rank 0 alone waits for rank 1, whose process lives and stays silent."""
    work = wire.post([], [(Rank(1, 0), torch.zeros(3))], stream=4)
    with pytest.raises(DeadlineExceeded, match=r"exchange on stream 4: receive from \(1, 0\)"):
        work.wait()
    with pytest.raises(DeadlineExceeded, match=r"exchange on stream 4"):
        work.wait()
    with pytest.raises(Unavailable):
        wire.post([], [(Rank(1, 0), torch.zeros(3))], stream=5)


def poll_for_silence(wire: Transport) -> None:
    work = wire.post([], [(Rank(1, 0), torch.zeros(3))], stream=4)
    for ask in (lambda: finish(work), work.done, work.wait):
        with pytest.raises(DeadlineExceeded, match=r"exchange on stream 4: receive from \(1, 0\)"):
            ask()


def find_rank_0_lost_by_polling(wire: Transport) -> None:
    with pytest.raises(Unavailable, match=r"\(0, 0\)"):
        finish(wire.post([], [(Rank(0, 0), torch.zeros(3))], stream=0))


def find_rank_0_lost(wire: Transport) -> None:
    with pytest.raises(Unavailable, match=r"\(0, 0\)"):
        wire.post([], [(Rank(0, 0), torch.zeros(3))], stream=0).wait()


def find_rank_2_lost(wire: Transport) -> None:
    with pytest.raises(Unavailable, match=r"\(2, 0\)"):
        wire.post([], [(Rank(2, 0), torch.zeros(3))], stream=0).wait()


def abort_while_waiting(wire: Transport) -> None:
    about_to_wait = threading.Event()

    def drain() -> None:
        about_to_wait.wait()
        wire.abort("node is draining")
        wire.abort("a later reason")

    thread = threading.Thread(target=drain)
    thread.start()
    works = [wire.post([], [(Rank(1, 0), torch.zeros(3))], stream=s) for s in range(2)]
    about_to_wait.set()
    for work in works:
        with pytest.raises(Unavailable, match="node is draining"):
            work.wait()
    thread.join()
    with pytest.raises(Unavailable, match="node is draining"):
        wire.post([], [(Rank(1, 0), torch.zeros(3))], stream=0)


BETWEEN_NODES: list[Callable[[Transport], None]] = [
    uneven_rows_of_every_dtype,
    empty_messages_are_skipped,
    row_slices_are_filled_in_place,
    one_stream_keeps_its_order,
    streams_do_not_wait_for_each_other,
    streams_run_on_threads_of_their_own,
    one_thread_polls_streams_in_any_order,
    an_exchange_under_way_is_not_done,
    both_ways_at_once_with_megabytes,
    all_ranks_of_the_pool_sum_in_rank_order,
    bytes_are_counted_between_nodes,
    what_cannot_be_sent_is_refused,
]
WITHIN_A_NODE: list[Callable[[Transport], None]] = [
    all_reduce_sums_in_rank_order,
    gather_takes_unequal_slices,
    broadcast_fills_every_rank,
    collectives_and_messages_share_a_stream,
    bytes_are_counted_within_a_node,
    what_cannot_be_reduced_is_refused,
]


@pytest.mark.parametrize("case", BETWEEN_NODES, ids=lambda case: case.__name__)
def test_between_nodes(pool: Connect, case: Callable[[Transport], None]) -> None:
    pool(3, 1).run(case)


@pytest.mark.parametrize("case", WITHIN_A_NODE, ids=lambda case: case.__name__)
def test_within_a_node(pool: Connect, case: Callable[[Transport], None]) -> None:
    pool(1, 3).run(case)


def test_a_silent_peer_ends_in_the_deadline(pool: Connect) -> None:
    ranks = pool(3, 1, timeout_s=0.5)
    ranks.run(wait_for_silence, range(1))
    ranks.run(find_rank_0_lost, range(1, 3))


def test_a_silent_peer_ends_polling_in_the_deadline(pool: Connect) -> None:
    ranks = pool(3, 1, timeout_s=0.5)
    ranks.run(poll_for_silence, range(1))
    ranks.run(find_rank_0_lost_by_polling, range(1, 3))


def test_abort_wakes_waiters_and_peers(pool: Connect) -> None:
    ranks = pool(3, 1)
    ranks.run(abort_while_waiting, range(1))
    ranks.run(find_rank_0_lost, range(1, 3))


@pytest.mark.parametrize("pool", PROCESSES, indirect=True)
def test_a_killed_peer_is_noticed(pool: Connect) -> None:
    ranks = pool(3, 1)
    ranks.start(find_rank_2_lost, range(2))
    ranks.workers[2].kill()
    ranks.gather(range(2))
