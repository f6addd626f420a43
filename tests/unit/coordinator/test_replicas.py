"""Least loaded first, and why each replica can't be used when none can."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tknp.coordinator.replicas import Replicas
from tknp.coordinator.startup import Peer
from tknp.errors import Unavailable
from tknp.rpc.channel import connect
from tknp.v1.common_pb2 import Phase, Progress

MakeRanks = Callable[..., Sequence[Sequence[Peer]]]


@pytest.fixture
async def make_ranks() -> MakeRanks:
    """`make_ranks(2, 1)`: ready replicas of two ranks and of one. Nothing is ever asked of them."""

    def make(*sizes: int) -> list[list[Peer]]:
        return [
            [Peer(f"prefill {p}, rank {t}", f"h{p}:{t + 1}", connect(f"h{p}:{t + 1}"),
                  progress=Progress(phase=Phase.PHASE_READY)) for t in range(size)]
            for p, size in enumerate(sizes)
        ]  # fmt: skip

    return make


async def test_the_fewest_prompt_tokens_win(make_ranks: MakeRanks) -> None:
    replicas = Replicas(make_ranks(1, 1))
    assert [replicas.take(tokens, {}) for tokens in (100, 30, 30, 30, 30, 1)] == [0, 1, 1, 1, 1, 0]
    assert replicas.requests == [2, 4]
    for _ in range(2):
        replicas.give(1, 30)
    assert replicas.take(1, {}) == 1


async def test_a_lost_replica_is_not_used_until_it_answers(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(1, 1)
    replicas = Replicas(ranks)
    replicas.lost(0, "gone")
    assert [replicas.take(1, {}) for _ in range(3)] == [1, 1, 1]
    ranks[0][0].lost = ""
    assert replicas.take(1, {}) == 0


async def test_a_request_never_comes_back_to_who_lost_it(make_ranks: MakeRanks) -> None:
    replicas = Replicas(make_ranks(1, 1))
    assert replicas.take(1, {0: "it was lost there"}) == 1
    with pytest.raises(Unavailable, match=r"no prefill replica is left: once; twice"):
        replicas.take(1, {0: "once", 1: "twice"})


async def test_a_replica_is_as_well_as_its_ranks(make_ranks: MakeRanks) -> None:
    ranks = make_ranks(2, 1, 1)
    ranks[0][1].lost = "no answer"
    ranks[1][0].misfit = "dtype differs"
    ranks[2][0].progress = Progress(phase=Phase.PHASE_LOADING)
    with pytest.raises(Unavailable) as raised:
        Replicas(ranks).take(1, {})
    assert str(raised.value) == (
        "no prefill replica is left: prefill 0, rank 1 at h0:2: no answer; "
        "prefill 1, rank 0 at h1:1: dtype differs; prefill 2, rank 0 at h2:1: not ready: loading"
    )
