"""Where the seconds of steps go: by kind of operation, and by role and part.

    step |  control  | operation | operation | ... | settle |
                        busy, waiting

An operation is busy while it computes, posts or copies, and waits while a peer has not sent, or not
taken, its rows; with several streams also while the rank computes for another one. What a step
takes beyond its operations is control: applying the delta, page tables, deriving the program. The
engine's thread adds; others read what the last finished step left, so that parts always add up to
whole steps. Each stream has times of its own: steps of several overlap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from tknp.layout.program import Kind, Op

Role = Literal["root", "owner"]
Part = Literal["dense", "attention", "exchange", "idle", "control"]
_SIDES = tuple((kind, sends) for kind in Kind for sends in (False, True))
_AT = {kind: 2 * i for i, kind in enumerate(Kind)}
_EXCHANGES = (
    Kind.SCATTER, Kind.QUERY, Kind.GATHER, Kind.EXCHANGE, Kind.LSE_GATHER, Kind.REDUCE_SCATTER,
    Kind.HANDOFF, Kind.FEEDBACK, Kind.ALL_REDUCE,
)  # fmt: skip
_ATTENTION = (Kind.ATTEND, Kind.MERGE)


def part_of(kind: Kind) -> Part:
    """What an operation of `kind` is while it is busy."""
    if kind in _EXCHANGES:
        return "exchange"
    return "attention" if kind in _ATTENTION else "dense"


def role_of(kind: Kind, sends: bool) -> Role:
    """As what a rank runs an operation: owners attend, receive scatters and send gathers."""
    owner = kind is Kind.ATTEND or (kind, sends) in ((Kind.SCATTER, False), (Kind.GATHER, True))
    return "owner" if owner else "root"


class StepTimes:
    """Seconds since the rank began. `rest`: the role whose control time is counted."""

    def __init__(self, rest: Role) -> None:
        self._rest = rest
        self._busy = [0.0] * len(_SIDES)
        self._idle = [0.0] * len(_SIDES)
        self._step = 0.0
        self._control = 0.0
        self._finished: tuple[Sequence[float], Sequence[float], float]
        self.finish(0.0)

    def add(self, op: Op, seconds: float, waited: float) -> None:
        """`op` took `seconds`, of which it `waited`."""
        at = _AT[op.kind] + (1 if op.sends else 0)
        self._busy[at] += seconds - waited
        self._idle[at] += waited
        self._step += seconds

    def finish(self, seconds: float) -> None:
        """A step took `seconds` with everything it did."""
        self._control += max(seconds - self._step, 0.0)
        self._step = 0.0
        self._finished = tuple(self._busy), tuple(self._idle), self._control

    @property
    def kinds(self) -> dict[Kind, float]:
        """Seconds of operations of finished steps by kind, waiting included."""
        busy, idle, _ = self._finished
        seconds = dict.fromkeys(Kind, 0.0)
        for at, (kind, _sends) in enumerate(_SIDES):
            seconds[kind] += busy[at] + idle[at]
        return seconds

    @property
    def parts(self) -> dict[tuple[Role, Part], float]:
        """Seconds of finished steps by role and part."""
        busy, idle, control = self._finished
        seconds: defaultdict[tuple[Role, Part], float] = defaultdict(float)
        for at, (kind, sends) in enumerate(_SIDES):
            role = role_of(kind, sends)
            seconds[role, part_of(kind)] += busy[at]
            seconds[role, "idle"] += idle[at]
        return {**seconds, (self._rest, "control"): control}


def parts_of(streams: Iterable[StepTimes]) -> dict[tuple[Role, Part], float]:
    """Seconds of finished steps of all streams of a rank, by role and part."""
    seconds: defaultdict[tuple[Role, Part], float] = defaultdict(float)
    for times in streams:
        for place, spent in times.parts.items():
            seconds[place] += spent
    return dict(seconds)
