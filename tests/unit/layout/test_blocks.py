"""Layer blocks: coverage, balance against brute force, endpoints."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.errors import InvalidValue
from tknp.layout.blocks import (
    ATTENTION_RATIO,
    Block,
    cut,
    cut_pairs,
    cut_pipeline,
    cut_time,
)
from tknp.model.footprint import Footprint, footprint


@st.composite
def problems(draw: st.DrawFn) -> tuple[Footprint, list[int], bool]:
    """Up to 8 layers of unequal size on up to 5 roots of equal or unequal memory."""
    roots = draw(st.integers(1, 5))
    layers = draw(st.lists(st.integers(1, 30), min_size=roots, max_size=8))
    weights = Footprint(tuple(layers), draw(st.integers(0, 60)), draw(st.integers(0, 60)))
    if draw(st.booleans()):
        memories = [draw(st.integers(0, 200))] * roots
    else:
        memories = draw(st.lists(st.integers(0, 200), min_size=roots, max_size=roots))
    return weights, memories, draw(st.booleans())


def _budgets(weights: Footprint, memories: list[int], blocks: tuple[Block, ...]) -> list[int]:
    return [m - b.weight_bytes(weights) for m, b in zip(memories, blocks, strict=True)]


def _quality(budgets: list[int]) -> tuple[int, int]:
    """Higher is better: the floor, then how equal the budgets are above it."""
    floor = min(budgets)
    return floor, -sum((budget - floor) ** 2 for budget in budgets)


def _every_cut(layers: int, roots: int, *, tied: bool) -> list[tuple[Block, ...]]:
    return [
        tuple(
            Block(start, stop, embedding=i == 0, head=i == (0 if tied else roots - 1))
            for i, (start, stop) in enumerate(pairwise((0, *inner, layers)))
        )
        for inner in combinations(range(1, layers), roots - 1)
    ]


@given(problems())
def test_cut_is_as_good_as_the_best_of_all_cuts(
    problem: tuple[Footprint, list[int], bool],
) -> None:
    weights, memories, tied = problem
    every = _every_cut(len(weights.layers), len(memories), tied=tied)
    chosen = cut(weights, memories, tied=tied)
    assert chosen in every
    best = max(_quality(_budgets(weights, memories, blocks)) for blocks in every)
    assert _quality(_budgets(weights, memories, chosen)) == best


@given(problems())
def test_blocks_hold_every_layer_once_in_order(
    problem: tuple[Footprint, list[int], bool],
) -> None:
    weights, memories, tied = problem
    blocks = cut(weights, memories, tied=tied)
    assert [layer for b in blocks for layer in b.layers] == list(range(len(weights.layers)))
    assert not any(b.empty for b in blocks)
    assert [b.embedding for b in blocks] == [True, *[False] * (len(blocks) - 1)]
    assert sum(b.head for b in blocks) == 1
    assert blocks[0 if tied else -1].head
    assert sum(b.weight_bytes(weights) for b in blocks) == weights.total


@settings(max_examples=50)
@given(layers=st.integers(1, 40), data=st.data())
def test_equal_layers_without_endpoints_differ_by_one_layer_at_most(
    layers: int, data: st.DataObject
) -> None:
    roots = data.draw(st.integers(1, layers))
    sizes = [len(b.layers) for b in cut(Footprint((7,) * layers, 0, 0), [500] * roots, tied=False)]
    assert max(sizes) - min(sizes) <= 1


@given(problems(), st.integers(-500, 500))
def test_only_differences_of_memory_matter(
    problem: tuple[Footprint, list[int], bool], more: int
) -> None:
    weights, memories, tied = problem
    assert cut(weights, [m + more for m in memories], tied=tied) == cut(
        weights, memories, tied=tied
    )


def test_root_with_more_memory_takes_more_layers() -> None:
    blocks = cut(Footprint((10,) * 8, 0, 0), [100, 140], tied=False)
    assert [len(b.layers) for b in blocks] == [2, 6]


def test_tied_first_block_of_smollm2_carries_the_matrix_and_fewer_layers(smollm2: Any) -> None:
    """The embedding is a fifth of SmolLM2's bytes: 11 layers and 19."""
    first, second = cut(footprint(smollm2, "bfloat16"), [10**9, 10**9], tied=True)
    assert first == Block(0, 11, embedding=True, head=True)
    assert second == Block(11, 30)


def test_untied_endpoints_of_llama_405b_shorten_the_outer_blocks(llama_405b: Any) -> None:
    weights = footprint(llama_405b, "bfloat16", 8)
    blocks = cut(weights, [80 * 10**9] * 4, tied=False)
    sizes = [len(b.layers) for b in blocks]
    assert sum(sizes) == 126
    assert max(sizes[0], sizes[3]) < min(sizes[1], sizes[2])
    budgets = _budgets(weights, [80 * 10**9] * 4, blocks)
    assert max(budgets) - min(budgets) <= weights.layers[0]


def test_exact_where_squares_exceed_the_precision_of_floats() -> None:
    """The first root sets the floor; (6u, 6u) beats (6u + 1, 6u - 1) by 2 in 72 * 10**24."""
    u = 10**12
    chosen = cut(Footprint((u, 3 * u, 1, 3 * u), 0, 0), [u, 9 * u + 1, 9 * u], tied=False)
    assert [b.stop for b in chosen] == [1, 3, 4]


@pytest.mark.parametrize("roots", [0, 4])
def test_more_roots_than_layers_or_none_are_refused(roots: int) -> None:
    with pytest.raises(InvalidValue, match="give 1 to 3 root nodes") as error:
        cut(Footprint((1, 1, 1), 0, 0), [9] * roots, tied=False)
    assert (error.value.field, error.value.value) == ("nodes", roots)


def test_empty_block_holds_nothing() -> None:
    block = Block(0, 0)
    assert block.empty
    assert block.weight_bytes(Footprint((5, 5), 3, 3)) == 0


@given(problems(), st.sampled_from([0.0, 1.0]))
def test_time_cut_has_the_shortest_longest_block(problem: Any, ratio: float) -> None:
    """Looking up embeddings is free; the head is not."""
    weights, memories, tied = problem
    head = weights.head + weights.embedding * tied

    def longest(blocks: tuple[Block, ...]) -> float:
        per_byte = 1 + ratio
        return max(sum(weights.layers[b.start : b.stop]) * per_byte + head * b.head for b in blocks)

    every = _every_cut(len(weights.layers), len(memories), tied=tied)
    chosen = cut_time(weights, len(memories), tied=tied, attention_ratio=ratio)
    assert chosen in every
    assert longest(chosen) == min(map(longest, every))


@given(problems(), st.integers(200, 900))
def test_pipeline_cut_holds_the_most_tokens(problem: Any, more: int) -> None:
    weights, memories, tied = problem
    memories = [memory + more for memory in memories]

    def tokens(blocks: tuple[Block, ...]) -> int:
        budgets = _budgets(weights, memories, blocks)
        return min(
            budget // len(block.layers) for budget, block in zip(budgets, blocks, strict=True)
        )

    every = _every_cut(len(weights.layers), len(memories), tied=tied)
    chosen = cut_pipeline(weights, memories, tied=tied)
    if min(_budgets(weights, memories, cut(weights, memories, tied=tied))) > 0:
        assert tokens(chosen) == max(map(tokens, every))
    else:
        alike = cut_time(weights, len(memories), tied=tied, attention_ratio=ATTENTION_RATIO)
        assert chosen == alike


@settings(max_examples=30)
@given(st.data())
def test_pairs_cut_is_within_a_layer_of_the_best(data: st.DataObject) -> None:
    """Layers of a model are alike but for the first and the last, and endpoints weigh more."""
    roots, layer = data.draw(st.sampled_from([2, 4])), 10
    edges = data.draw(st.integers(0, 10))
    count = data.draw(st.integers(max(roots, 2), 10))
    layers = (layer + edges, *[layer] * (count - 2), layer + edges)
    weights = Footprint(layers, data.draw(st.integers(0, 30)), data.draw(st.integers(0, 30)))
    memories = data.draw(st.lists(st.integers(300, 320), min_size=roots, max_size=roots))
    tied, half = data.draw(st.booleans()), roots // 2

    def floor(blocks: tuple[Block, ...]) -> int:
        held = [b.weight_bytes(weights) for b in blocks]
        return min(
            min(memories[b], memories[b + half]) - held[b] - held[b + half] for b in range(half)
        )

    chosen = cut_pairs(weights, memories, tied=tied)
    every = _every_cut(count, roots, tied=tied)
    assert chosen in every
    assert floor(chosen) > max(map(floor, every)) - layer - edges
