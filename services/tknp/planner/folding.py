"""A step's programs in few words: operations that many layers and nodes share, said once. Pure.

Peers are named by what they are (root, owner, rank) and not by number, so that all layers that a
node roots, and all nodes that root, have the same operations.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tknp.layout.program import Kind, Op, Program, Scope, Transfer
from tknp.layout.rank import Rank
from tknp.planner.step import Step


@dataclass(frozen=True)
class Peers:
    """`count` transfers of `nbytes` each, to or from ranks that are all `role`."""

    role: str
    count: int
    nbytes: int
    what: tuple[str, ...]
    network: bool


@dataclass(frozen=True)
class FoldedOp:
    """An operation without layer and names of peers."""

    kind: Kind
    rows: int
    sends: tuple[Peers, ...]
    receives: tuple[Peers, ...]
    operand_bytes: int
    scope: Scope


@dataclass(frozen=True)
class Where:
    """Layers [first, last] of `stream` at rank (node, t); -1 of no layer."""

    node: int
    t: int
    stream: int
    first: int
    last: int


@dataclass(frozen=True)
class Segment:
    """`operations` happen, in this order, at each of `where`."""

    operations: tuple[FoldedOp, ...]
    where: tuple[Where, ...]


def fold(step: Step) -> tuple[Segment, ...]:
    """Segments in the order in which they first happen."""
    places: defaultdict[tuple[FoldedOp, ...], list[Where]] = defaultdict(list)
    for stream, programs in enumerate(step.programs):
        for rank, program in programs.items():
            for layer, operations in _cut(program):
                if rank.t and layer >= 0:  # as rank 0
                    continue
                folded = tuple(_folded(step, stream, rank, op) for op in operations)
                _extend(places[folded], Where(rank.node, rank.t, stream, layer, layer))
    segments = [Segment(operations, tuple(where)) for operations, where in places.items()]
    return tuple(sorted(segments, key=_place))


def _place(segment: Segment) -> tuple[int, int]:
    kind = segment.operations[0].kind
    order = {Kind.EMBED: 0, Kind.HANDOFF: 2, Kind.SAMPLE: 3, Kind.FEEDBACK: 4}
    return order.get(kind, 1), -len(segment.operations)


def _cut(program: Program) -> Iterable[tuple[int, Sequence[Op]]]:
    """Operations by layer, and apart from them handoffs, the first and the last ones."""
    run: list[Op] = []
    for op in program:
        alone = op.kind in (Kind.EMBED, Kind.HANDOFF, Kind.SAMPLE, Kind.FEEDBACK)
        if run and (alone or op.layer != run[-1].layer or _alone(run[-1])):
            yield run[-1].layer, run
            run = []
        run.append(op)
    if run:
        yield run[-1].layer, run


def _alone(op: Op) -> bool:
    return op.kind in (Kind.HANDOFF, Kind.SAMPLE, Kind.FEEDBACK)


def _extend(places: list[Where], new: Where) -> None:
    if places and new.first >= 0:
        last = places[-1]
        if (last.node, last.t, last.stream, last.last + 1) == (
            new.node, new.t, new.stream, new.first,
        ):  # fmt: skip
            places[-1] = Where(last.node, last.t, last.stream, last.first, new.last)
            return
    places.append(new)


def _folded(step: Step, stream: int, rank: Rank, op: Op) -> FoldedOp:
    return FoldedOp(
        op.kind,
        op.rows,
        _peers(step, stream, rank, op, [(t, t.dst) for t in op.sends]),
        _peers(step, stream, rank, op, [(t, t.src) for t in op.recvs]),
        op.operand_bytes,
        op.scope,
    )


def _peers(
    step: Step, stream: int, rank: Rank, op: Op, moves: Iterable[tuple[Transfer, Rank]]
) -> tuple[Peers, ...]:
    """Bytes by peer, equal ones together."""
    sizes: Counter[tuple[Rank, bool]] = Counter()
    what: defaultdict[Rank, set[str]] = defaultdict(set)
    for transfer, peer in moves:
        sizes[peer, transfer.crosses_nodes] += transfer.nbytes
        what[peer].add(transfer.what)
    alike = Counter(
        (_role(step, stream, rank, op, peer), nbytes, tuple(sorted(what[peer])), network)
        for (peer, network), nbytes in sizes.items()
    )
    return tuple(
        Peers(role, count, nbytes, moved, network)
        for (role, nbytes, moved, network), count in alike.items()
    )


def _role(step: Step, stream: int, rank: Rank, op: Op, peer: Rank) -> str:
    layout = step.layout
    match op.kind:
        case Kind.HANDOFF:
            return "next root" if op.sends else "last root"
        case Kind.SAMPLE:
            return "sampling rank" if op.sends else "rank"
        case Kind.FEEDBACK:
            return "embedding rank" if op.sends else "sampling rank"
    if layout.spread:
        return "node"
    return "root" if peer.node == layout.roots(stream)[op.layer] else "owner"
