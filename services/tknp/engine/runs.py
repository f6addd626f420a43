"""Runs of whole layers in a program: what a rank computes, and exchanges, in one go.

    Project Scatter Attend Gather Finish | Project Scatter Attend Gather Finish | Handoff | ...
    '------------------------- Run(layers 0..1) ------------------------------'
    Scatter Attend Gather | Scatter Attend Gather | Handoff | ...      the same layers at an owner

Layers of a run are alike: the same operations on the same rows with the same peers. Which
operations may be part of one is up to what runs them (`takes`); peers can't tell whether they ran
one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from torch import Tensor

from tknp.kernels.layers import Ran
from tknp.layout.program import Kind, Op, Program
from tknp.transport.base import Work

_ROOT = (Kind.PROJECT, Kind.SCATTER, Kind.ATTEND, Kind.GATHER, Kind.FINISH)
_OWNER = (Kind.SCATTER, Kind.ATTEND, Kind.GATHER)
_DENSE = (Kind.PROJECT, Kind.FINISH)
_EXCHANGES = (Kind.SCATTER, Kind.GATHER)


@dataclass(frozen=True, eq=False)
class Run:
    """`layers`, one after another; `ops` are their operations, equally many of each layer."""

    layers: range
    ops: Program

    @property
    def stages(self) -> Program:
        """The operations of the first layer."""
        return self.ops[: len(self.ops) // len(self.layers)]

    @property
    def roots(self) -> bool:
        return any(op.kind in _DENSE for op in self.stages)

    @property
    def exchanges(self) -> bool:
        return any(op.kind in _EXCHANGES for op in self.stages)


Piece = Op | Run
Takes = Callable[[Op], bool]
RunLayers = Callable[[Run, Tensor], Generator[Work, None, Ran]]
"""Runs on the residual stream; yields what has to be waited for."""


def pieces(program: Program, takes: Takes) -> tuple[Piece, ...]:
    """`program` with its runs of layers, of operations that `takes` accepts, as one piece each."""
    return tuple(_pieces(program, takes))


def _pieces(program: Program, takes: Takes) -> Iterator[Piece]:
    at = 0
    while at < len(program):
        layer = _layer(program, at, takes)
        if not layer:
            yield program[at]
            at += 1
            continue
        stop = at + len(layer)
        while _alike(layer, following := _layer(program, stop, takes), program[stop - 1].layer + 1):
            stop += len(following)
        yield Run(range(program[at].layer, program[stop - 1].layer + 1), program[at:stop])
        at = stop


def _layer(program: Program, at: int, takes: Takes) -> Program:
    """The whole layer that begins at `at`; nothing if it can't be run in one go."""
    stop = at
    while stop < len(program) and program[stop].kind in _ROOT:
        if program[stop].layer != program[at].layer:
            break
        stop += 1
    ops = program[at:stop]
    kinds = tuple(op.kind for op in ops)
    # A root without rows of its own doesn't attend, one that owns all rows exchanges nothing.
    in_order = kinds == tuple(kind for kind in _ROOT if kind in kinds)
    root = in_order and all(kind in kinds for kind in _DENSE)
    owner = kinds == _OWNER and ops[0].recvs
    if not (root or owner) or not all(map(takes, ops)):
        return ()
    batches = {(op.start, op.stop) for op in ops if op.kind in _DENSE}
    return () if len(batches) > 1 else ops


def _alike(layer: Program, following: Program, index: int) -> bool:
    """Whether `following` is layer `index` and has the operations of `layer`."""
    return len(layer) == len(following) and all(
        other.layer == index
        and (op.kind, op.start, op.stop) == (other.kind, other.start, other.stop)
        and op.sends == other.sends
        and op.recvs == other.recvs
        for op, other in zip(layer, following, strict=True)
    )
