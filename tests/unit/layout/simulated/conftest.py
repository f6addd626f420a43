"""A simulator of programs.

Every rank has one or more lanes (a CUDA stream with its own communicator, a thread with its own
mailbox). A lane runs tasks one after another in virtual time:

    compute for delay(rank, task)  ->  post all sends and receives  ->  done when all are matched

This is the worst case of any transport: nothing is buffered, so that a transfer needs both its ends
posted, and nothing has a tag, so that the k-th send of a lane from a to b meets the k-th receive of
that lane at b from a. An EXCHANGE is done when it is posted; the MERGE of its rows waits for its
ends. An all-reduce needs all ranks of its scope. Ends that meet but differ raise Mismatch; lanes
that wait for ever raise Deadlock, and so do ends that nobody met.
"""

from __future__ import annotations

import heapq
import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank


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


@pytest.fixture(scope="session")
def simulator() -> type[Simulator]:
    return Simulator


@pytest.fixture(scope="session")
def observer() -> type[Observer]:
    return Observer
