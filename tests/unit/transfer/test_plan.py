"""Every byte of a prompt reaches every owner rank that keeps it, once."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import InvalidValue, ProtocolError
from tknp.model.config import ModelConfig
from tknp.model.shard import Shard
from tknp.transfer.plan import Piece, pieces, reach, routes, sent_heads
from tknp.v1.common_pb2 import Placement


def config(kv_heads: int, layers: int = 3) -> ModelConfig:
    return ModelConfig(32, 48, 24, layers, kv_heads * 8, kv_heads, 2, 512)


def shard(kv_heads: int, tp: int, rank: int, layers: int = 3) -> Shard:
    return Shard(config(kv_heads, layers), 0, layers, True, True, tp, rank)


def legal(kv_heads: int, tp: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


DEGREES = st.sampled_from(
    [(h, a, b) for h in (1, 2, 3, 8) for a in (1, 2, 3, 4, 8) for b in (1, 2, 3, 4, 8)
     if legal(h, a) and legal(h, b)]
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    kv_heads: int
    prefill_tp: int
    tokens: int
    page_size: int
    cuts: tuple[int, ...]
    placements: tuple[Placement, ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A prompt on T' ranks, its owners on T ranks of one to three nodes, and chunk boundaries."""
    kv_heads, prefill_tp, tp = draw(DEGREES)
    page_size = draw(st.sampled_from([1, 4, 5]))
    tokens = draw(st.integers(1, 23))
    whole_pages = -(-tokens // page_size)
    width = draw(st.integers(1, min(3, whole_pages)))
    bounds = [whole_pages * i // width * page_size for i in range(width)] + [tokens + 7]
    layer_cut = draw(st.sampled_from([0, 1, 2]))
    placements = []
    page = 1
    for node in range(width):
        for layers in ((0, layer_cut), (layer_cut, 3)) if layer_cut else ((0, 3),):
            span = bounds[node + 1] - bounds[node]
            ids = list(range(page, page + -(-span // page_size)))[::-1]
            page += len(ids)
            for rank in range(tp):
                heads = shard(kv_heads, tp, rank).kv_heads
                placements.append(
                    Placement(
                        node=node, tp_rank=rank, layer_start=layers[0], layer_stop=layers[1],
                        head_start=heads.start, head_stop=heads.stop, token_start=bounds[node],
                        token_stop=bounds[node + 1], pages=ids,
                    )
                )  # fmt: skip
    inner = st.sets(st.integers(1, tokens - 1)) if tokens > 1 else st.just(set())
    cuts = (0, *sorted(draw(inner)), tokens)
    return Case(kv_heads, prefill_tp, tokens, page_size, cuts, tuple(placements))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_every_token_of_every_head_reaches_every_keeper_once(case: Case) -> None:
    arrived: Counter[tuple[int, int, int, int]] = Counter()
    for rank in range(case.prefill_tp):
        mine = shard(case.kv_heads, case.prefill_tp, rank)
        for route in routes(mine, case.placements, case.page_size):
            kept = case.placements[route.index]
            for layer in mine.layers:
                for start, stop in zip(case.cuts, case.cuts[1:], strict=False):
                    for piece in pieces(route, layer, start, stop):
                        at = kept.token_start + case.page_size * list(kept.pages).index(
                            piece.dst_page
                        )
                        assert at == piece.src_page * case.page_size
                        for slot in range(piece.first_slot, piece.last_slot):
                            for src, dst in zip(piece.src_heads, piece.dst_heads, strict=True):
                                head = kept.head_start + dst
                                assert mine.kv_heads[src] == head
                                arrived[layer, at + slot, head, route.index] += 1
    expected = Counter(
        (layer, token, head, index)
        for index, p in enumerate(case.placements)
        for layer in range(p.layer_start, p.layer_stop)
        for token in range(p.token_start, min(p.token_stop, case.tokens))
        for head in range(p.head_start, p.head_stop)
    )
    assert arrived == expected


@settings(max_examples=60, deadline=None)
@given(cases())
def test_reach_covers_the_prompt_and_ends_where_an_owner_is_missing(case: Case) -> None:
    for rank in range(case.prefill_tp):
        mine = shard(case.kv_heads, case.prefill_tp, rank)
        found = routes(mine, case.placements, case.page_size)
        if not sent_heads(mine):
            assert reach(mine, found) == sys.maxsize
            continue
        assert reach(mine, found) == case.tokens + 7
        ranks_of_head = [r for r in found if r.heads.start == found[0].heads.start]
        hole = [r for r in found if r not in ranks_of_head or r.tokens.start > 0]
        assert reach(mine, hole) == 0


def test_replicated_heads_are_sent_by_the_lowest_rank_only() -> None:
    assert [len(sent_heads(shard(2, 8, rank))) for rank in range(8)] == [1, 0, 0, 0, 1, 0, 0, 0]


def test_a_chunk_inside_pages_touches_its_slots_only() -> None:
    placement = Placement(
        layer_start=1, layer_stop=3, head_start=0, head_stop=2, token_start=4, token_stop=16,
        pages=[9, 7, 5],
    )  # fmt: skip
    (route,) = routes(shard(2, 1, 0), [placement], 4)
    assert pieces(route, 2, 6, 13) == [
        Piece(1, 9, range(2), range(2), 2, 4),
        Piece(2, 7, range(2), range(2), 0, 4),
        Piece(3, 5, range(2), range(2), 0, 1),
    ]
    assert pieces(route, 2, 0, 4) == []
    assert pieces(route, 0, 4, 16) == []
    assert (route.src_layer, route.dst_layer) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_start": 3}, r"placements\[0\].token_start=3: must be a multiple of page_size=4"),
        ({"head_stop": 0}, r"placements\[0\].head_stop=0"),
        ({"layer_stop": 0}, r"placements\[0\].layer_stop=0"),
        ({"token_start": 12}, r"placements\[0\].token_stop=8"),
    ],
)
def test_placements_that_cannot_be_written_are_refused(
    change: dict[str, int], message: str
) -> None:
    fields = {"layer_stop": 3, "head_stop": 1, "token_stop": 8} | change
    with pytest.raises(InvalidValue, match=message):
        routes(shard(1, 1, 0), [Placement(**fields, pages=[1, 2])], 4)


def test_owners_of_no_token_get_nothing() -> None:
    whole = Placement(layer_stop=3, head_stop=1, token_stop=8, pages=[1, 2])
    empty = Placement(node=1, layer_stop=3, head_stop=1, pages=[1])
    (route,) = routes(shard(1, 1, 0), [empty, whole], 4)
    assert (route.index, route.node) == (1, 0)
    assert reach(shard(1, 1, 0), [route]) == 8


def test_too_few_pages_are_refused() -> None:
    placement = Placement(layer_stop=3, head_stop=1, token_stop=9, pages=[1, 2])
    with pytest.raises(ProtocolError, match="3 of 4 tokens are needed"):
        routes(shard(1, 1, 0), [placement], 4)
