"""Ranks that run whole layers in one go, exchanges included, beside ranks that run operations.

Ranks are threads over rings in shared memory. Compiled lanes are what whole layers need, so that
the same steps over Python's lanes run operation by operation.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tknp.engine.backend import choose_backend
from tknp.engine.batch import Admit, Delta
from tknp.engine.decode import DecodeRank, Outcome
from tknp.engine.recorder import Recorder
from tknp.engine.runs import Run
from tknp.errors import DeadlineExceeded, ProtocolError, TknpError, Unavailable
from tknp.kernels.library import available
from tknp.kernels.mailbox import NativeLane
from tknp.kv.holding import Key
from tknp.kv.storage import KvStorage
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.layout.shares import Shares
from tknp.model.checkpoint import open_checkpoint
from tknp.sampling.params import SamplingParams
from tknp.transport import shared_memory
from tknp.transport.base import Work
from tknp.transport.lane import LaneFactory, PythonLane

CPU = torch.device("cpu")
PAGE, PAGES, ROWS, LAYERS, FILLED = 16, 24, 6, 6, 40
PARAMS = SamplingParams(temperature=0.0, max_tokens=99, ignore_eos=True, logprobs=4)
NODES = [NodeSpec(1 << 20)] * 2
ROLES = [NodeSpec(1, owner=False), NodeSpec(1), NodeSpec(1, root=False)]
TOGETHER, ONE_BY_ONE = NativeLane, PythonLane
WIDE, NARROW = 512 * 1024, 256  # a ring that holds any message, and one that holds none

pytestmark = pytest.mark.usefixtures("kernels")


@pytest.fixture(scope="module")
def kernels() -> None:
    status = available()
    if not status:
        pytest.skip(status.reason)


class Node:
    """One node of a single rank, which it joins the pool `name` as."""

    def __init__(
        self,
        path: Path,
        specs: Sequence[NodeSpec],
        rank: Rank,
        lanes: LaneFactory,
        name: str,
        ring_bytes: int = WIDE,
        timeout_s: float = 60.0,
    ) -> None:
        checkpoint, self.rank = open_checkpoint(path), rank
        config = checkpoint.config
        self.layout = layout = make_layout(config, "bfloat16", 1, specs)
        heads = layout.heads(rank)
        backend = choose_backend(
            heads, page_size=PAGE, max_positions=512, dtype=torch.bfloat16, device=CPU
        )
        self.storage: KvStorage | None = None
        if layout.kv_layers(rank):
            self.storage = KvStorage(
                config.layers, PAGES, len(heads.kv_heads), PAGE, config.head_dim, torch.bfloat16
            )
            self.storage.fill(rank.node)
        dense = [
            backend.dense(checkpoint.load(shard, torch.bfloat16)) for shard in layout.shards(rank)
        ]
        self.transport: Any = shared_memory.connect(
            rank, len(specs), 1, pool=name, epoch=1, timeout_s=timeout_s, streams=1,
            ring_bytes=ring_bytes, lanes=lanes,
        )  # fmt: skip
        self.engine = DecodeRank(
            layout, rank, self.transport, dense=dense[0] if dense else None,
            attention=backend.decode_attention() if self.storage else None, storage=self.storage,
            epoch=1, max_batch=ROWS, device=CPU, recorder=Recorder(),
        )  # fmt: skip

    def delta(self, step: int, owners: Sequence[int] = (), ends: Sequence[int] = ()) -> Delta:
        """A step as this node is told of it: a request of each of `owners` joins."""
        admits = tuple(
            Admit(
                slot, Key(str(slot), 1), (owner,), Shares((owner,), FILLED), FILLED, 7 + slot,
                PARAMS,
                pages=tuple(range(1 + 4 * slot, 5 + 4 * slot)) if owner == self.rank.node else (),
            )
            for slot, owner in enumerate(owners)
        )  # fmt: skip
        return Delta(1, 0, step, tuple(ends), admits)


class Pool:
    """Nodes as threads; `lanes` says how each moves messages."""

    def __init__(
        self, path: Path, specs: Sequence[NodeSpec], lanes: Sequence[LaneFactory], **options: Any
    ) -> None:
        self.threads = ThreadPoolExecutor(len(specs))
        name = secrets.token_hex(8)
        self.nodes = list(
            self.threads.map(
                lambda node: Node(path, specs, Rank(node, 0), lanes[node], name, **options),
                range(len(specs)),
            )
        )
        self.layout = self.nodes[0].layout
        self.number = 0

    def step(self, owners: Sequence[int] = (), ends: Sequence[int] = ()) -> Outcome:
        """Run a step on all nodes; what the sampling rank drew."""
        deltas = [node.delta(self.number, owners, ends) for node in self.nodes]
        engines = [node.engine for node in self.nodes]
        outcomes = list(self.threads.map(lambda engine, d: engine.step(d), engines, deltas))
        self.number += 1
        return outcomes[self.layout.sampler(0)]

    def close(self) -> None:
        for node in self.nodes:
            node.transport.close()
        self.threads.shutdown()


@pytest.fixture
def pool_of(random_checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def make(specs: Sequence[NodeSpec], lanes: Sequence[LaneFactory], **options: Any) -> Pool:
        made.append(Pool(random_checkpoint(layers=LAYERS, tied=True), specs, lanes, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def finish(steps: Iterator[Work], work: Work) -> Outcome:
    """Go on with a step that waits for `work`."""
    try:
        while True:
            work.wait()
            work = next(steps)
    except StopIteration as end:
        outcome: Outcome = end.value
        return outcome


def shown(outcome: Outcome) -> Any:
    return outcome.slots, outcome.tokens, outcome.logprobs


def operations(node: Node, steps: Callable[[], Any]) -> tuple[Any, list[Any]]:
    """What `steps` returns, and what the rank recorded of it."""
    recording = node.engine.recorder.start(100)
    result = steps()
    node.engine.recorder.stop(recording)
    return result, recording.operations


@pytest.mark.parametrize("ring_bytes", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize(
    ("specs", "owners"),
    [(NODES, (0, 1, 0, 1)), (ROLES, (1, 2, 2))],
    ids=["nodes", "roles"],
)
def test_both_ways_give_the_same_bits(
    pool_of: Callable[..., Pool], specs: list[NodeSpec], owners: tuple[int, ...], ring_bytes: int
) -> None:
    """Tokens, logits, pages, bytes sent, what is recorded; also where peers differ in the way."""
    count = len(specs)
    ways = [[ONE_BY_ONE] * count, [TOGETHER] * count, [TOGETHER, *[ONE_BY_ONE] * (count - 1)]]
    results = []
    for lanes in ways:
        pool = pool_of(specs, lanes, ring_bytes=ring_bytes)

        def steps(pool: Pool = pool) -> list[Any]:
            begun = [shown(pool.step(owners)), shown(pool.step())]
            return [*begun, shown(pool.step(ends=[1])), shown(pool.step())]

        drawn, recorded = operations(pool.nodes[0], steps)
        state = pool.nodes[0].engine._lanes[0].state
        runs = [piece for piece in state.program if isinstance(piece, Run)]
        assert any(run.exchanges for run in runs) is (lanes[0] is TOGETHER)
        ends = [op.start_s + op.seconds for op in recorded]
        assert all(op.start_s >= end - 1e-6 for op, end in zip(recorded[1:], ends, strict=False))
        assert all(0 <= op.waited_s <= op.seconds for op in recorded)
        results.append(
            (
                drawn,
                [node.transport.sent_bytes for node in pool.nodes],
                [(op.step, op.kind, op.layer) for op in recorded],
                [node.storage.data for node in pool.nodes if node.storage],
            )
        )
    expected, *found = results
    for result in found:
        assert result[:3] == expected[:3]
        assert all(torch.equal(a, b) for a, b in zip(result[3], expected[3], strict=True))


def test_seconds_are_counted_where_they_are_spent(pool_of: Callable[..., Pool]) -> None:
    pool = pool_of(NODES, [TOGETHER] * 2)
    pool.step((0, 1))
    root = pool.nodes[0]
    _, recorded = operations(root, pool.step)
    before = root.engine.times[0].kinds
    _, more = operations(root, pool.step)
    after = root.engine.times[0].kinds
    for kind in (Kind.PROJECT, Kind.SCATTER, Kind.ATTEND, Kind.GATHER, Kind.FINISH):
        spent = sum(op.seconds for op in more if op.kind is kind)
        assert after[kind] - before[kind] == pytest.approx(spent)
        assert spent > 0
    assert len(recorded) == len(more)


@pytest.mark.parametrize("late", [0, 1])
def test_a_wait_that_takes_long_is_left_to_who_drives_the_step(
    pool_of: Callable[..., Pool], late: int
) -> None:
    """The peer begins once this rank has given up its core; then the call goes on behind it."""
    lanes = [TOGETHER] * 2
    expected = shown(pool_of(NODES, lanes).step((0, 1, 1)))
    pool = pool_of(NODES, lanes)
    peer, here = pool.nodes[late], pool.nodes[1 - late]
    with torch.inference_mode():
        steps = here.engine.steps(here.delta(0, (0, 1, 1)))
        work = next(steps)
        assert not work.done()
        theirs = pool.threads.submit(peer.engine.step, peer.delta(0, (0, 1, 1)))
        mine = finish(steps, work)
    outcomes = {1 - late: mine, late: theirs.result(60)}
    assert shown(outcomes[pool.layout.sampler(0)]) == expected


def test_processes_as_threads_and_one_that_ends(
    pool_of: Callable[..., Pool], random_checkpoint: Callable[..., Path]
) -> None:
    """The peer is this file run as a script, which takes part in two steps and is gone."""
    threads = pool_of(NODES, [TOGETHER] * 2)
    expected = [shown(threads.step((1, 0, 1))), shown(threads.step())]
    path, name = random_checkpoint(layers=LAYERS, tied=True), secrets.token_hex(8)
    with subprocess.Popen([sys.executable, __file__, str(path), name]) as peer:
        node = Node(path, NODES, Rank(0, 0), TOGETHER, name)
        try:
            drawn = [shown(node.engine.step(node.delta(0, (1, 0, 1))))]
            drawn.append(shown(node.engine.step(node.delta(1))))
            assert drawn == expected
            with pytest.raises(Unavailable, match=r"rank \(1, 0\) is lost: its process ended"):
                node.engine.step(node.delta(2))
        finally:
            node.transport.close()
    assert peer.returncode == 0


# What a rank that takes no part as it should does to one that waits for it in a run.
def _leaves(pool: Pool) -> None:
    pool.nodes[1].transport.abort("out of memory")


def _is_silent(pool: Pool) -> None:
    return None


def _sends_something_else(pool: Pool) -> None:
    pool.nodes[1].transport.post([(Rank(0, 0), torch.zeros(3))], [], stream=0)


def _is_not_waited_for_any_more(pool: Pool) -> None:
    pool.nodes[0].transport.abort("shutting down")


FAULTS: dict[str, tuple[Callable[[Pool], None], float, type[TknpError], str]] = {
    "lost": (
        _leaves, 60, Unavailable,
        r"exchange on stream 0: receive from \(1, 0\); rank \(1, 0\) is lost: out of memory",
    ),
    "silent": (
        _is_silent, 0.2, DeadlineExceeded,
        r"exchange on stream 0: receive from \(1, 0\) not done after 0\.2 s",
    ),
    "wrong": (_sends_something_else, 60, ProtocolError, r"12 bytes of torch\.float32, expected"),
    "aborted": (_is_not_waited_for_any_more, 60, Unavailable, "shutting down"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("early", [True, False], ids=["before", "meanwhile"])
@pytest.mark.parametrize("lane", [TOGETHER, ONE_BY_ONE])
def test_a_run_ends_as_operations_do(
    pool_of: Callable[..., Pool], lane: LaneFactory, early: bool, fault: str
) -> None:
    act, timeout_s, kind, message = FAULTS[fault]
    pool = pool_of(NODES, [lane] * 2, timeout_s=timeout_s)
    root = pool.nodes[0]
    waiting = threading.Event()

    def run() -> None:
        with torch.inference_mode():
            steps = root.engine.steps(root.delta(0, (0, 1)))
            for work in steps:
                waiting.set()
                work.wait()

    if early:
        act(pool)
    future = pool.threads.submit(run)
    if not early:
        assert waiting.wait(60)
        act(pool)
    with pytest.raises(kind, match=message):
        future.result(60)
    assert root.transport.broken is not None  # which is how peers are told


if __name__ == "__main__":  # the peer of the test with processes
    me = Node(Path(sys.argv[1]), NODES, Rank(1, 0), TOGETHER, sys.argv[2])
    me.engine.step(me.delta(0, (1, 0, 1)))
    me.engine.step(me.delta(1))
    os._exit(0)  # without a word to the other
