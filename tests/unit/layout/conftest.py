"""A simulator of programs, and the layouts and steps that the tests of this package draw.

Every rank has one or more lanes (a CUDA stream with its own communicator, a thread with its own
mailbox). A lane runs tasks one after another in virtual time:

    compute for delay(rank, task)  ->  post all sends and receives  ->  done when all are matched

This is the worst case of any transport: nothing is buffered, so that a transfer needs both its ends
posted, and nothing has a tag, so that the k-th send of a lane from a to b meets the k-th receive of
that lane at b from a. An all-reduce needs all ranks of its node. Ends that meet but differ raise
Mismatch; lanes that wait for ever raise Deadlock.
"""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pytest
from hypothesis import strategies as st

from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.tknp import derive
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
class _Lane:
    tasks: Sequence[Task]
    at: int = 0
    unmatched: int = 0  # ends of the current task that have not met theirs


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
        self._ends: dict[object, deque[tuple[LaneId, Task, Transfer | None]]] = defaultdict(deque)
        self._finish: dict[int, float] = {}
        for where in self._state:
            self._compute(0.0, where)
        while self._events:
            now, _, where = heapq.heappop(self._events)
            self._post(now, where)
        stuck = {
            w: lane.tasks[lane.at] for w, lane in self._state.items() if lane.at < len(lane.tasks)
        }
        if stuck:
            waits = (
                f"{rank}: {task.op.kind} of layer {task.op.layer}"
                for (rank, _), task in stuck.items()
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
        lane.unmatched = len(op.sends) + len(op.recvs) + reduces
        for transfer in op.sends:
            self._meet(now, (transfer.src, transfer.dst, number), where, task, transfer, "send")
        for transfer in op.recvs:
            self._meet(now, (transfer.src, transfer.dst, number), where, task, transfer, "recv")
        if reduces:
            self._reduce(now, (rank.node, number), where, task)
        if not len(op.sends) + len(op.recvs) + reduces:
            self._complete(now, where)

    def _meet(
        self, now: float, channel: object, where: LaneId, task: Task, transfer: Transfer, side: str
    ) -> None:
        other_side = "recv" if side == "send" else "send"
        waiting = self._ends[channel, other_side]
        if not waiting:
            self._ends[channel, side].append((where, task, transfer))
            return
        peer, peer_task, peer_transfer = waiting.popleft()
        mine = (task.stream, task.op.kind, task.op.layer, transfer)
        theirs = (peer_task.stream, peer_task.op.kind, peer_task.op.layer, peer_transfer)
        if mine != theirs:
            raise self.Mismatch(f"{mine} met {theirs}")
        self.observer.moved(task, transfer)
        self._matched(now, where)
        self._matched(now, peer)

    def _reduce(self, now: float, group: object, where: LaneId, task: Task) -> None:
        waiting = self._ends[group]
        if waiting and (waiting[0][1].stream, waiting[0][1].op) != (task.stream, task.op):
            raise self.Mismatch(f"{task} met {waiting[0][1]}")
        waiting.append((where, task, None))
        if len(waiting) == self.tp:
            arrived = [peer for peer, _, _ in waiting]
            waiting.clear()
            for peer in arrived:
                self._matched(now, peer)

    def _matched(self, now: float, where: LaneId) -> None:
        lane = self._state[where]
        lane.unmatched -= 1
        if not lane.unmatched:
            self._complete(now, where)

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
    """A layout, the rows of each node, and the program of each rank."""

    layout: Layout
    rows: tuple[int, ...]

    @property
    def batch(self) -> int:
        return sum(self.rows)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Rows [start, stop) of each node, owner-major."""
        return [(sum(self.rows[:g]), sum(self.rows[: g + 1])) for g in range(len(self.rows))]

    @cached_property
    def programs(self) -> dict[Rank, Program]:
        return {rank: derive(self.layout, self.rows, rank) for rank in self.layout.ranks()}

    def kinds(self, *kinds: Kind) -> Iterable[tuple[Rank, Op]]:
        return ((rank, op) for rank, p in self.programs.items() for op in p if op.kind in kinds)


@st.composite
def draw_layout(draw: st.DrawFn) -> Layout:
    tp = draw(st.integers(1, 3))
    layers = draw(st.integers(1, 7))
    kv_heads = draw(st.sampled_from([1, tp, 2 * tp]))
    size = draw(st.integers(1, 20))
    config = ModelConfig(
        vocab_size=tp * tp + size,
        hidden_size=2 * size + 1,
        intermediate_size=tp * size,
        layers=layers,
        q_heads=max(kv_heads, tp) * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 + 2 * (size % 3),
        max_position=64,
        tied_embeddings=draw(st.booleans()),
    )
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
def draw_rows(draw: st.DrawFn, layout: Layout) -> tuple[int, ...]:
    owned = draw(st.lists(st.integers(0, 4), min_size=layout.nodes, max_size=layout.nodes))
    return tuple(rows if n in layout.owners[0] else 0 for n, rows in enumerate(owned))


@st.composite
def draw_step(draw: st.DrawFn) -> Step:
    layout = draw(draw_layout())
    return Step(layout, draw(draw_rows(layout)))


@st.composite
def draw_streams(draw: st.DrawFn) -> list[Step]:
    """Two or three streams of one layout."""
    layout = draw(draw_layout())
    return [Step(layout, draw(draw_rows(layout))) for _ in range(draw(st.integers(2, 3)))]


@pytest.fixture(scope="session")
def simulator() -> type[Simulator]:
    return Simulator


@pytest.fixture(scope="session")
def observer() -> type[Observer]:
    return Observer


@pytest.fixture(scope="session")
def make_step() -> type[Step]:
    return Step


@pytest.fixture(scope="session")
def steps() -> st.SearchStrategy[Step]:
    """Up to 5 nodes of up to 3 ranks, up to 7 layers, every mix of roles, up to 4 rows a node."""
    return draw_step()


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
