"""Runs the programs of all ranks in virtual time.

A rank has one lane a stream, one compute resource, and two links, NVLink and network, each sending
and receiving one transfer at a time. At every operation the resource goes to the oldest step that
can go on (of equal ones to the lowest stream) or, given a layout, to the stream that
`tknp.layout.turns` says, as in the engine on CPUs; but a head is one operation here. A lane runs
its operations in order:

    computation   waits for the rank's compute resource, holds it for its price
    send          posted; the lane goes on (`buffered`) or waits until it has arrived
    receive       waits for the arrival; an Exchange waits in the Merge that needs its rows
    all-reduce    waits for all ranks of its scope, then takes its price

Nothing has a tag, as on any transport: the k-th send of a stream from a to b meets the k-th receive
of that stream at b from a. Ends that meet but differ raise Mismatch; lanes that wait for ever, and
sends that nobody takes, raise Deadlock. `buffered=False` is the worst case of a transport: programs
that pass so pass everywhere.

Only some ranks may be simulated, say those of t = 0. A peer that is not is taken to be at the same
operation at the same time.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from tknp.engine.times import part_of
from tknp.errors import TknpError
from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.turns import Known, Turns
from tknp.planner.prices import Prices
from tknp.planner.spans import Span

Programs = Mapping[Rank, Program]
_Rows = tuple[int, int, int]


class Deadlock(TknpError):
    """Programs whose ranks would wait for each other for ever."""


class Mismatch(TknpError):
    """Two ends of a transfer, or members of an all-reduce, that disagree."""


@dataclass
class _Lane:
    """Program of one stream on one rank, `steps` times over."""

    rank: Rank
    stream: int
    program: Program
    total: int
    at: int = 0
    waits: int = 0  # ends of the current operation that have not arrived
    posted_s: float = 0.0
    moved_s: float = 0.0  # when the first transfer of the current operation began to move
    # Of Exchange operations by layer and rows: receives that have not arrived.
    exchanges: Counter[_Rows] = field(default_factory=Counter)
    merging: bool = False  # the current operation waits for an exchange

    @property
    def over(self) -> bool:
        return self.at == self.total

    @property
    def op(self) -> Op:
        return self.program[self.at % len(self.program)]

    @property
    def step(self) -> int:
        return self.at // len(self.program)

    def known(self) -> Iterator[Known]:
        """The step under way and the one behind it."""
        if not self.over:
            yield self.stream, self.step, self.op
        if (self.step + 1) * len(self.program) < self.total:
            yield self.stream, self.step + 1, None


@dataclass
class _Rank:
    """`turns`: None where steps go by their age."""

    turns: Turns | None
    lanes: list[_Lane]
    busy: bool = False
    ready: list[_Lane] = field(default_factory=list)

    def next(self) -> _Lane | None:
        """The lane that computes now; None if none is ready, or it is none's turn."""
        if not self.turns:
            return min(self.ready, key=lambda lane: (lane.step, lane.stream), default=None)
        chosen = self.turns.choose(
            (step for lane in self.lanes for step in lane.known()),
            [(lane.stream, lane.step, lane.op) for lane in self.ready],
        )
        return next((lane for lane in self.ready if lane.stream == chosen), None)


@dataclass(frozen=True)
class _End:
    lane: _Lane
    step: int
    op: Op
    transfer: Transfer
    waits: bool


def _rows(op: Op) -> _Rows:
    return op.layer, op.start, op.stop


def simulate(
    streams: Sequence[Programs],
    prices: Prices,
    *,
    steps: int = 1,
    starts_s: Sequence[float] = (),
    buffered: bool = True,
    layout: Layout | None = None,
) -> list[Span]:
    """What every rank of `streams` does in `steps` steps of each stream.

    `streams[s]`: programs of stream s, which begins at `starts_s[s]`, or at 0. `layout`: has every
    rank's streams take turns. Raises Deadlock and Mismatch.
    """
    return _Simulation(streams, prices, steps, buffered, layout).run(starts_s)


class _Simulation:
    def __init__(
        self,
        streams: Sequence[Programs],
        prices: Prices,
        steps: int,
        buffered: bool,
        layout: Layout | None,
    ) -> None:
        self._prices = prices
        self._buffered = buffered
        self._lanes = [
            _Lane(rank, stream, program, steps * len(program))
            for stream, programs in enumerate(streams)
            for rank, program in programs.items()
            if program
        ]
        self._known = {lane.rank for lane in self._lanes}
        self._members = Counter((lane.stream, lane.rank.node) for lane in self._lanes)
        self._ranks = {
            rank: _Rank(_turns(layout, rank), [each for each in self._lanes if each.rank == rank])
            for rank in self._known
        }
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._ends: defaultdict[tuple[Rank, Rank, int, str], deque[_End]] = defaultdict(deque)
        self._links: defaultdict[tuple[Rank, bool, str], float] = defaultdict(float)
        self._reduces: defaultdict[tuple[int | str, int], list[_Lane]] = defaultdict(list)
        self.spans: list[Span] = []

    def run(self, starts_s: Sequence[float]) -> list[Span]:
        for lane in self._lanes:
            start = starts_s[lane.stream] if lane.stream < len(starts_s) else 0.0
            self._at(start, partial(self._begin, lane=lane))
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        stuck = [lane for lane in self._lanes if not lane.over]
        if stuck:
            raise Deadlock("; ".join(
                f"rank {lane.rank}, stream {lane.stream}, step {lane.step}: "
                f"{lane.op.kind} of layer {lane.op.layer}" for lane in stuck
            ))  # fmt: skip
        for ends in self._ends.values():
            for end in ends:
                raise Deadlock(f"nobody takes {end.op.kind} of layer {end.op.layer} from "
                               f"{end.transfer.src} to {end.transfer.dst}")  # fmt: skip
        return self.spans

    def _at(self, time: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def _begin(self, now: float, lane: _Lane) -> None:
        if lane.over:
            return
        op = lane.op
        if op.kind is Kind.MERGE and lane.exchanges[_rows(op)]:
            lane.merging = True
            return
        if part_of(op.kind) == "exchange":
            self._post(now, lane)
            return
        rank = self._ranks[lane.rank]
        rank.ready.append(lane)
        # All that becomes ready at one instant competes for the resource.
        self._at(now, lambda then: self._dispatch(then, rank))

    def _dispatch(self, now: float, rank: _Rank) -> None:
        lane = None if rank.busy else rank.next()
        if lane is None:
            return
        rank.ready.remove(lane)
        rank.busy = True
        seconds = self._prices.compute_s(lane.rank, lane.stream, lane.op)
        self._record(lane, lane.step, lane.op, now, seconds)

        def computed(then: float) -> None:
            rank.busy = False
            self._post(then, lane)
            self._dispatch(then, rank)

        self._at(now + seconds, computed)

    def _post(self, now: float, lane: _Lane) -> None:
        """The computation of the current operation is over: post what it moves."""
        op = lane.op
        lane.posted_s = now
        lane.moved_s = float("inf")
        lane.waits = 1  # released below, so that nothing completes while ends are being posted
        deferred = op.kind is Kind.EXCHANGE
        for transfer in op.sends:
            waits = not self._buffered and not deferred
            self._meet(now, _End(lane, lane.step, op, transfer, waits), deferred, "send")
        for transfer in op.recvs:
            self._meet(now, _End(lane, lane.step, op, transfer, not deferred), deferred, "recv")
        if op.kind is Kind.ALL_REDUCE:
            lane.waits += 1
            self._reduce(now, lane)
        self._arrived(now, lane)

    def _meet(self, now: float, end: _End, deferred: bool, side: str) -> None:
        transfer, lane = end.transfer, end.lane
        if end.waits:
            lane.waits += 1
        elif deferred and side == "recv":
            lane.exchanges[_rows(end.op)] += 1
        other = "recv" if side == "send" else "send"
        peer = transfer.dst if side == "send" else transfer.src
        if peer not in self._known:
            self._move(now, transfer, {side: end})
            return
        channel = (transfer.src, transfer.dst, lane.stream)
        waiting = self._ends[*channel, other]
        if not waiting:
            self._ends[*channel, side].append(end)
            return
        met = waiting.popleft()
        if met.transfer != transfer or (met.op.kind, met.op.layer) != (end.op.kind, end.op.layer):
            raise Mismatch(f"{end.op.kind} of layer {end.op.layer}, {transfer}, met "
                           f"{met.op.kind} of layer {met.op.layer}, {met.transfer}")  # fmt: skip
        self._move(now, transfer, {side: end, other: met})

    def _move(self, now: float, transfer: Transfer, ends: Mapping[str, _End]) -> None:
        held, flight = self._prices.transfer_s(transfer)
        crosses = transfer.crosses_nodes
        links = [(transfer.src, crosses, "out"), (transfer.dst, crosses, "in")]
        start = max(now, *(self._links[link] for link in links))
        for link in links:
            self._links[link] = start + held
        for side, end in ends.items():
            if end.waits:
                end.lane.moved_s = min(end.lane.moved_s, start)
            elif end.op.kind is not Kind.EXCHANGE or side == "send":
                self._record(end.lane, end.step, end.op, start, held)
            self._at(start + held + flight, self._arrival(end, side))

    def _arrival(self, end: _End, side: str) -> Callable[[float], None]:
        def arrived(now: float) -> None:
            lane = end.lane
            if end.waits:
                self._arrived(now, lane)
            elif end.op.kind is Kind.EXCHANGE and side == "recv":
                lane.exchanges[_rows(end.op)] -= 1
                if lane.merging and not lane.exchanges[_rows(lane.op)]:
                    lane.merging = False
                    self._begin(now, lane)

        return arrived

    def _reduce(self, now: float, lane: _Lane) -> None:
        op = lane.op
        pool = op.scope == "pool"
        group = "pool" if pool else lane.rank.node
        waiting = self._reduces[group, lane.stream]
        if waiting and waiting[0].op != op:
            raise Mismatch(f"{op.kind} of layer {op.layer} at {lane.rank} met "
                           f"layer {waiting[0].op.layer} at {waiting[0].rank}")  # fmt: skip
        waiting.append(lane)
        if len(waiting) < self._size(lane, pool=pool):
            return
        seconds = self._prices.all_reduce_s(op)
        for member in waiting:
            member.moved_s = now
            self._at(now + seconds, partial(self._arrived, lane=member))
        waiting.clear()

    def _size(self, lane: _Lane, *, pool: bool) -> int:
        """Ranks that meet in an all-reduce, of those that are simulated."""
        if not pool:
            return self._members[lane.stream, lane.rank.node]
        return sum(n for (stream, _), n in self._members.items() if stream == lane.stream)

    def _arrived(self, now: float, lane: _Lane) -> None:
        lane.waits -= 1
        if lane.waits:
            return
        if now > lane.posted_s:
            waited = min(lane.moved_s, now) - lane.posted_s
            self._record(lane, lane.step, lane.op, lane.posted_s, now - lane.posted_s, waited)
        lane.at += 1
        self._begin(now, lane)
        self._dispatch(now, self._ranks[lane.rank])  # a visit may be over

    def _record(
        self, lane: _Lane, step: int, op: Op, start_s: float, seconds: float, waited_s: float = 0.0
    ) -> None:
        self.spans.append(
            Span(lane.rank, lane.stream, step, op.kind, op.layer, start_s, seconds, waited_s)
        )


def _turns(layout: Layout | None, rank: Rank) -> Turns | None:
    if layout is None or layout.streams == 1:
        return None
    return Turns.of(layout, rank.node)
