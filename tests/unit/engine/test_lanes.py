"""Two microbatches on one thread: they root one after another, and fail together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tknp.engine.backend import choose_backend
from tknp.engine.batch import Admit, Delta
from tknp.engine.decode import DecodeRank, Outcome
from tknp.engine.lanes import Lanes
from tknp.engine.thread import EngineThread
from tknp.errors import InvalidValue, ProtocolError, Unavailable
from tknp.kv.holding import Key
from tknp.kv.storage import KvStorage
from tknp.layout.layout import NodeSpec, make_layout
from tknp.layout.program import Kind
from tknp.layout.rank import Rank
from tknp.layout.shares import Shares
from tknp.model.checkpoint import open_checkpoint
from tknp.sampling.params import SamplingParams
from tknp.transport.local import LocalHub

CPU = torch.device("cpu")
HERE, PEER = Rank(0, 0), Rank(1, 0)


class Pair:
    """Two nodes of one rank and two microbatches; this one runs lanes, the peer what it is told."""

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        layout = make_layout(
            checkpoint.config, "float32", 1, [NodeSpec(1 << 20)] * 2, microbatches=2
        )
        self.hub = LocalHub(2, 1, timeout_s=60)

        def engine(rank: Rank) -> DecodeRank:
            heads = layout.heads(rank)
            backend = choose_backend(
                heads, page_size=4, max_positions=64, dtype=torch.float32, device=CPU
            )
            (shard,) = layout.shards(rank)
            storage = KvStorage(2, 8, len(heads.kv_heads), 4, heads.config.head_dim, torch.float32)
            return DecodeRank(
                layout, rank, self.hub.transport(rank),
                dense=backend.dense(checkpoint.load(shard, torch.float32)),
                attention=backend.decode_attention(), storage=storage,
                epoch=1, max_batch=2, device=CPU,
            )  # fmt: skip

        self.peer, self.rank = engine(PEER), engine(HERE)
        self.lanes = Lanes(self.rank, CPU)
        self.thread = EngineThread("lanes")

    def submit(self, delta: Delta) -> Future[Outcome]:
        future = self.lanes.submit(delta)
        self.thread.submit(self.lanes.run)
        return future


@pytest.fixture
def pair(random_checkpoint: Callable[..., Path]) -> Iterator[Pair]:
    made = Pair(random_checkpoint(layers=2))
    yield made
    made.hub.transport(HERE).close()
    assert made.thread.close(60)


def first(stream: int) -> Delta:
    """One request, owned by the peer, so that every step needs it."""
    params = SamplingParams(temperature=0.0, max_tokens=9)
    admit = Admit(0, Key(str(stream), 1), (1,), Shares((1,), 0), 0, 7, params, pages=(stream + 1,))
    return Delta(1, stream, 0, admits=(admit,))


def test_streams_root_at_a_node_one_after_another(pair: Pair) -> None:
    """Both are ready at once, and the first waits for its peer in the middle of its layer."""
    recording = pair.rank.recorder.start(2)
    both = [(first(stream), Delta(1, stream, 1)) for stream in (0, 1)]
    steps = [pair.submit(delta) for stream in both for delta in stream]
    for turn in (0, 1):
        for stream in (0, 1):
            pair.peer.step(both[stream][turn])
    for step in steps:
        step.result(60)
    pair.rank.recorder.stop(recording)
    visits = [
        (op.stream, op.step)
        for op in recording.operations
        if op.kind in (Kind.EMBED, Kind.PROJECT, Kind.FINISH)
    ]
    assert list(dict.fromkeys(visits)) == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert visits == sorted(visits, key=lambda visit: (visit[1], visit[0]))


def test_steps_of_one_stream_keep_their_order(pair: Pair) -> None:
    steps = [pair.submit(first(0)), pair.submit(Delta(1, 0, 1)), pair.submit(Delta(1, 0, 2))]
    pair.peer.step(first(0))
    for step in (1, 2):
        pair.peer.step(Delta(1, 0, step))
    assert [step.result(60).delta.step for step in steps] == [0, 1, 2]


def test_a_failed_lane_ends_the_steps_of_all(pair: Pair) -> None:
    waiting, bad = pair.submit(first(0)), pair.submit(Delta(1, 1, 5))
    for future in (bad, waiting):
        with pytest.raises(ProtocolError, match="a message was lost"):
            future.result(60)
    with pytest.raises(Unavailable, match=r"failed in step 5"):
        pair.peer.step(first(0))
    with pytest.raises(ProtocolError, match="stopped earlier"):
        pair.submit(first(0)).result(60)


def test_a_lost_peer_ends_the_steps_of_all(pair: Pair) -> None:
    steps = [pair.submit(first(0)), pair.submit(first(1)), pair.submit(Delta(1, 1, 1))]
    pair.hub.transport(PEER).abort("out of memory")
    for step in steps:
        with pytest.raises((Unavailable, ProtocolError), match="out of memory"):
            step.result(60)


def test_a_stream_that_the_node_has_no_part_in_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidValue, match=r"stream=2: node 0 takes part in \(0, 1\)"):
        pair.submit(Delta(1, 2, 0)).result(60)
