"""Runs of whole layers in a program: what a rank may compute in one go.

    Project Attend Finish | Project Attend Finish | Handoff | Sample
    '------------- Run(layers 0..1) -------------'

Nothing of these operations is sent, received or shared with other ranks, so that nobody can tell
whether they ran one by one. A root whose rows have owners elsewhere has no such layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from tknp.layout.program import Kind, Op, Program

PARTS = (Kind.PROJECT, Kind.ATTEND, Kind.FINISH)


@dataclass(frozen=True)
class Run:
    """`layers`, one after another, on all rows of a step; `ops` are their operations."""

    layers: range
    ops: Program


Piece = Op | Run
RunLayers = Callable[[Run, Tensor], tuple[Tensor, Sequence[float]]]
"""x -> x, which may be reused, and the seconds that each of `ops` took."""


def pieces(program: Program) -> tuple[Piece, ...]:
    """`program` with its runs of layers as one piece each."""
    return tuple(_pieces(program))


def _pieces(program: Program) -> Iterator[Piece]:
    at = 0
    while at < len(program):
        stop = at
        while _follows(program, at, stop):
            stop += len(PARTS)
        if stop == at:
            yield program[at]
            at += 1
            continue
        layers = range(program[at].layer, program[stop - 1].layer + 1)
        yield Run(layers, program[at:stop])
        at = stop


def _follows(program: Program, first: int, at: int) -> bool:
    """Whether the layer at `at` goes on with the run that begins at `first`."""
    ops = program[at : at + len(PARTS)]
    if tuple(op.kind for op in ops) != PARTS or any(op.partial for op in ops):
        return False
    rows = (program[first].start, program[first].stop)
    layer = program[first].layer + (at - first) // len(PARTS)
    return all((op.start, op.stop) == rows and op.layer == layer for op in ops)
