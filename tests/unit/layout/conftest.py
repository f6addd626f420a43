"""A simulator of programs, and the layouts and steps that the tests of this package draw.

Every rank has one or more lanes (a CUDA stream with its own communicator, a thread with its own
mailbox). A lane runs tasks one after another in virtual time:

    compute for delay(rank, task)  ->  post all sends and receives  ->  done when all are matched

This is the worst case of any transport: nothing is buffered, so that a transfer needs both its ends
posted, and nothing has a tag, so that the k-th send of a lane from a to b meets the k-th receive of
that lane at b from a. An EXCHANGE is done when it is posted; the MERGE of its rows waits for its
ends. An all-reduce needs all ranks of its scope. Ends that meet but differ raise Mismatch; lanes
that wait for ever raise Deadlock, and so do ends that nobody met.

Simulator, steps and what draws them stand in one file because tests share code by fixtures alone.
"""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import pytest
from hypothesis import strategies as st

from tknp.layout.derive import derive
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.rows import Group, arrange
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig


@dataclass(frozen=True)
class Task:
    """Operation `index` of the program of stream `stream`."""

    stream: int
    index: int
    op: Op


LaneId = tuple[Rank, int]
Lanes = Mapping[LaneId, Sequence[Task]]
Programs = Mapping[Rank, Program]
Delay = Callable[[Rank, Task], float]


class Observer:
    """Told of every transfer when its two ends meet and of every task when it is done."""

    def moved(self, task: Task, transfer: Transfer) -> None: ...

    def done(self, rank: Rank, task: Task) -> None: ...


@dataclass
class _Ticket:
    """What one task of a lane posted and is not yet matched."""

    where: LaneId
    task: Task
    left: int
    waited: bool = True  # the lane stands still for it


@dataclass
class _Lane:
    tasks: Sequence[Task]
    at: int = 0
    posted: dict[object, _Ticket] = field(default_factory=dict)  # exchanges that go on


@dataclass
class Simulator:
    """Runs lanes to their end. `delay`: seconds that a rank computes before it posts a task."""

    class Mismatch(Exception):
        """Two ends met that are not one operation."""

    class Deadlock(Exception):
        """Lanes wait for operations that nobody will post."""

    lanes: Lanes
    tp: int
    delay: Delay
    observer: Observer = field(default_factory=Observer)

    def run(self) -> dict[int, float]:
        """Virtual time in seconds at which each stream's last task is done."""
        self._state = {where: _Lane(tasks) for where, tasks in self.lanes.items()}
        self._events: list[tuple[float, int, LaneId]] = []
        self._ends: dict[object, deque[tuple[_Ticket, Transfer | None]]] = defaultdict(deque)
        self._finish: dict[int, float] = {}
        self._pool = len({rank for rank, _ in self.lanes})
        for where in self._state:
            self._compute(0.0, where)
        while self._events:
            now, _, where = heapq.heappop(self._events)
            self._post(now, where)
        stuck = {
            w: lane.tasks[lane.at] for w, lane in self._state.items() if lane.at < len(lane.tasks)
        }
        unmet = {t.where: t.task for ends in self._ends.values() for t, _ in ends}
        if stuck or unmet:
            waits = (
                f"{rank}: {task.op.kind} of layer {task.op.layer}"
                for (rank, _), task in {**unmet, **stuck}.items()
            )
            raise self.Deadlock("; ".join(waits))
        return self._finish

    def _compute(self, now: float, where: LaneId) -> None:
        lane = self._state[where]
        if lane.at < len(lane.tasks):
            ready = now + self.delay(where[0], lane.tasks[lane.at])
            heapq.heappush(self._events, (ready, len(self._events), where))

    def _post(self, now: float, where: LaneId) -> None:
        rank, number = where
        lane = self._state[where]
        task = lane.tasks[lane.at]
        op = task.op
        reduces = op.kind is Kind.ALL_REDUCE
        ticket = _Ticket(where, task, len(op.sends) + len(op.recvs) + reduces)
        rows = (task.stream, op.layer, op.start, op.stop)
        if op.kind is Kind.EXCHANGE:
            ticket.waited = False
            lane.posted[rows] = ticket
        if op.kind is Kind.MERGE and rows in lane.posted:
            exchange = lane.posted.pop(rows)
            exchange.waited = True
            if exchange.left:
                return
        for transfer in op.sends:
            self._meet(now, (transfer.src, transfer.dst, number), ticket, transfer, "send")
        for transfer in op.recvs:
            self._meet(now, (transfer.src, transfer.dst, number), ticket, transfer, "recv")
        if reduces:
            group = (op.scope, number, rank.node if op.scope == "node" else None)
            self._reduce(now, group, ticket, self.tp if op.scope == "node" else self._pool)
        if op.kind is Kind.EXCHANGE or not len(op.sends) + len(op.recvs) + reduces:
            self._complete(now, where)

    def _meet(
        self, now: float, channel: object, ticket: _Ticket, transfer: Transfer, side: str
    ) -> None:
        other_side = "recv" if side == "send" else "send"
        waiting = self._ends[channel, other_side]
        if not waiting:
            self._ends[channel, side].append((ticket, transfer))
            return
        peer, peer_transfer = waiting.popleft()
        task, peer_task = ticket.task, peer.task
        mine = (task.stream, task.op.kind, task.op.layer, transfer)
        theirs = (peer_task.stream, peer_task.op.kind, peer_task.op.layer, peer_transfer)
        if mine != theirs:
            raise self.Mismatch(f"{mine} met {theirs}")
        self.observer.moved(task, transfer)
        self._matched(now, ticket)
        self._matched(now, peer)

    def _reduce(self, now: float, group: object, ticket: _Ticket, size: int) -> None:
        waiting, task = self._ends[group], ticket.task
        if waiting:
            first = waiting[0][0].task
            if (first.stream, first.op) != (task.stream, task.op):
                raise self.Mismatch(f"{task} met {first}")
        waiting.append((ticket, None))
        if len(waiting) == size:
            arrived = [peer for peer, _ in waiting]
            waiting.clear()
            for peer in arrived:
                self._matched(now, peer)

    def _matched(self, now: float, ticket: _Ticket) -> None:
        ticket.left -= 1
        if ticket.waited and not ticket.left:
            self._complete(now, ticket.where)

    def _complete(self, now: float, where: LaneId) -> None:
        lane = self._state[where]
        task = lane.tasks[lane.at]
        self.observer.done(where[0], task)
        self._finish[task.stream] = max(now, self._finish.get(task.stream, 0.0))
        lane.at += 1
        self._compute(now, where)

    @staticmethod
    def tasks(program: Program, stream: int = 0) -> list[Task]:
        return [Task(stream, index, op) for index, op in enumerate(program)]

    @classmethod
    def separate(cls, streams: Sequence[Programs]) -> Lanes:
        """Each stream on a lane of its own."""
        return {
            (rank, s): cls.tasks(program, s)
            for s, programs in enumerate(streams)
            for rank, program in programs.items()
        }

    @classmethod
    def merged(cls, streams: Sequence[Programs], offsets: Sequence[int]) -> Lanes:
        """All streams on one lane: by layer, stream s `offsets[s]` layers late, then by stream.

        Every rank derives this order without knowing the others' programs.
        """

        def phase(task: Task) -> tuple[float, int]:
            ends = task.op.kind in (Kind.SAMPLE, Kind.FEEDBACK)
            return float("inf") if ends else task.op.layer + offsets[task.stream], task.stream

        ranks = {rank for programs in streams for rank in programs}
        return {
            (rank, 0): sorted(
                (
                    task
                    for s, programs in enumerate(streams)
                    for task in cls.tasks(programs[rank], s)
                ),
                key=phase,
            )
            for rank in ranks
        }

    @staticmethod
    def random_delays(seed: int) -> Delay:
        """Delays that depend on rank, stream and index alone, whatever ran before."""

        def delay(rank: Rank, task: Task) -> float:
            return zlib.crc32(f"{seed} {rank} {task.stream} {task.index}".encode()) / 2**32

        return delay


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
def simulator() -> type[Simulator]:
    return Simulator


@pytest.fixture(scope="session")
def observer() -> type[Observer]:
    return Observer


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
