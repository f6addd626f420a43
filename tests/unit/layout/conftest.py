"""Layouts and steps that the tests of this package draw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import pytest
from hypothesis import strategies as st

from tknp.layout.derive import derive
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Program
from tknp.layout.rank import Rank
from tknp.layout.rows import Group, arrange
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig


@dataclass(frozen=True)
class Step:
    """A layout, a stream, the groups of its rows, and the program of each rank."""

    layout: Layout
    groups: tuple[Group, ...]
    stream: int = 0

    @classmethod
    def of(cls, layout: Layout, rows: Sequence[int], stream: int = 0) -> Step:
        """Rows of one owner each: `rows[n]` at node n."""
        groups = (Group((n,), n, count) for n, count in enumerate(rows) if count)
        return cls(layout, tuple(groups), stream)

    @property
    def batch(self) -> int:
        return sum(group.rows for group in self.groups)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows that each node owns alone."""
        return tuple(
            sum(g.rows for g in self.groups if g.owners == (n,)) for n in range(self.layout.nodes)
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Rows [start, stop) that each node owns alone."""
        stops = list(accumulate(self.rows))
        return [(stop - count, stop) for stop, count in zip(stops, self.rows, strict=True)]

    @cached_property
    def group_of(self) -> list[Group]:
        """Group of each row."""
        return [group for group in self.groups for _ in range(group.rows)]

    @cached_property
    def programs(self) -> dict[Rank, Program]:
        return {
            rank: derive(self.layout, self.stream, self.groups, rank)
            for rank in self.layout.ranks()
        }

    def kinds(self, *kinds: Kind) -> Iterable[tuple[Rank, Op]]:
        return ((rank, op) for rank, p in self.programs.items() for op in p if op.kind in kinds)


def small_model(
    size: int, layers: int, kv_heads: int, group: int, tp: int, ranks: int, *, tied: bool = False
) -> ModelConfig:
    """A model that every strategy can cut over `ranks` ranks, `tp` of them sharing a sequence."""
    return ModelConfig(
        vocab_size=ranks * ranks + size,  # no rank without a slice
        hidden_size=2 * size + 1,
        intermediate_size=ranks * size,
        layers=layers,
        q_heads=max(kv_heads, tp) * group,
        kv_heads=kv_heads,
        head_dim=ranks // tp * (2 + 2 * (size % 3)),
        max_position=64,
        tied_embeddings=tied,
    )


@st.composite
def draw_layout(draw: st.DrawFn) -> Layout:
    tp = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 7))
    kv_heads = draw(st.sampled_from([1, tp, 2 * tp]))
    size = draw(st.integers(1, 20))
    tied = draw(st.booleans())
    config = small_model(size, layers, kv_heads, draw(st.integers(1, 3)), tp, tp, tied=tied)
    both, root_only, owner_only = (True, True), (True, False), (False, True)
    roles = draw(st.lists(st.sampled_from([both, root_only, owner_only]), min_size=1, max_size=5))
    for n in [n for n, role in enumerate(roles) if role[0]][layers:]:
        roles[n] = owner_only
    if not any(root for root, _ in roles) or not any(owner for _, owner in roles):
        roles[0] = both
    more = draw(st.integers(0, 20_000))
    nodes = [NodeSpec(10_000 + n * more, *role) for n, role in enumerate(roles)]
    return make_layout(config, draw(st.sampled_from(["float32", "bfloat16"])), tp, nodes)


@st.composite
def draw_strategy(draw: st.DrawFn, *, several: bool = False) -> Layout:
    """Any strategy on up to 4 nodes of up to 3 ranks; `several`: of those with several streams."""
    kinds = ["dual", "offset", "pp", "dp"]
    kind = draw(st.sampled_from(kinds if several else ["wide", *kinds, "tp", "dcp", "helix"]))
    tp = draw(st.integers(1, 3))
    nodes = draw(st.sampled_from([2, 4] if kind == "dual" else [2, 3, 4] if several else [1, 2, 3]))
    logical = (1, nodes * tp) if kind == "tp" else (nodes, tp)
    spread = kind in ("dcp", "helix")
    ranks = nodes * tp if spread or kind == "tp" else tp
    heads = logical[1] * draw(st.integers(1, 2))
    config = small_model(
        draw(st.integers(1, 9)), draw(st.integers(nodes, 5)), heads, draw(st.integers(1, 2)),
        logical[1], ranks, tied=draw(st.booleans()),
    )  # fmt: skip
    microbatches = {"dual": 2, "offset": nodes, "pp": draw(st.integers(1 + several, 3))}
    return make_layout(
        config, draw(st.sampled_from(["float32", "bfloat16"])), logical[1],
        [NodeSpec(10**6)] * logical[0],
        strategy=Strategy(kind) if kind in list(Strategy) else Strategy.TKNP,
        copies=2 if kind == "dual" else 1,
        microbatches=microbatches.get(kind),
        overlap=draw(st.integers(1, 4)) if kind == "helix" else 1,
        domain_ranks=tp, inside=spread and draw(st.booleans()),
    )  # fmt: skip


@st.composite
def draw_rows(draw: st.DrawFn, layout: Layout) -> tuple[int, ...]:
    owned = draw(st.lists(st.integers(0, 4), min_size=layout.nodes, max_size=layout.nodes))
    return tuple(rows if n in layout.owners[0] else 0 for n, rows in enumerate(owned))


@st.composite
def draw_groups(draw: st.DrawFn, layout: Layout, stream: int) -> tuple[Group, ...]:
    """Up to 7 rows of one owner or several."""
    legal = layout.owners[stream]
    rows = {}
    for slot in range(draw(st.integers(0, 7))):
        owners = draw(st.permutations(legal))[: draw(st.integers(1, min(3, len(legal))))]
        rows[slot] = tuple(owners), draw(st.sampled_from(owners))
    return arrange(layout, rows)[1]


@st.composite
def draw_step(draw: st.DrawFn) -> Step:
    layout = draw(draw_layout())
    return Step.of(layout, draw(draw_rows(layout)))


@st.composite
def draw_any_step(draw: st.DrawFn) -> Step:
    layout = draw(draw_strategy())
    stream = draw(st.integers(0, layout.streams - 1))
    return Step(layout, draw(draw_groups(layout, stream)), stream)


@st.composite
def draw_streams(draw: st.DrawFn) -> list[Step]:
    """One step of each stream of a layout that has several."""
    layout = draw(draw_strategy(several=True))
    return [Step(layout, draw(draw_groups(layout, s)), s) for s in range(layout.streams)]


@st.composite
def draw_pair(draw: st.DrawFn) -> tuple[Step, Step]:
    """Two steps of one stream that differ in their rows."""
    step = draw(draw_any_step().filter(lambda step: step.batch > 0))
    other = draw(draw_groups(step.layout, step.stream))
    return step, replace(step, groups=other)


@pytest.fixture(scope="session")
def make_step() -> Callable[..., Step]:
    """From a layout and the rows that each node owns alone."""
    return Step.of


@pytest.fixture(scope="session")
def group_step() -> type[Step]:
    return Step


@pytest.fixture(scope="session")
def model() -> Callable[..., ModelConfig]:
    return small_model


@pytest.fixture(scope="session")
def steps() -> st.SearchStrategy[Step]:
    """One copy, one stream, one owner a row; up to 5 nodes of 3 ranks, every mix of roles."""
    return draw_step()


@pytest.fixture(scope="session")
def any_steps() -> st.SearchStrategy[Step]:
    """Every strategy; rows of several owners where it has them."""
    return draw_any_step()


@pytest.fixture(scope="session")
def pairs() -> st.SearchStrategy[tuple[Step, Step]]:
    return draw_pair()


@pytest.fixture(scope="session")
def streams() -> st.SearchStrategy[list[Step]]:
    return draw_streams()


@pytest.fixture(scope="session")
def llama_405b() -> ModelConfig:
    return ModelConfig(
        vocab_size=128_256, hidden_size=16_384, intermediate_size=53_248, layers=126,
        q_heads=128, kv_heads=8, head_dim=128, max_position=131_072,
    )  # fmt: skip


@pytest.fixture(scope="session")
def smollm2() -> ModelConfig:
    return ModelConfig(
        vocab_size=49_152, hidden_size=576, intermediate_size=1_536, layers=30,
        q_heads=9, kv_heads=3, head_dim=64, max_position=8_192, tied_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="session")
def two_nodes(smollm2: ModelConfig) -> Layout:
    """Two nodes of one rank, two layers each, untied."""
    config = replace(smollm2, layers=4, tied_embeddings=False)
    return make_layout(config, "float32", 1, [NodeSpec(10**9)] * 2)
