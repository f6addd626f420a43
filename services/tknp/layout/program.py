"""Programs: what one rank does in one step of one stream, as data.

The engine executes a program, the planner prices it, tests count its bytes. Rows are half-open
ranges of the step's owner-major batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tknp.layout.rank import Rank


class Kind(StrEnum):
    """Operations, by the papers' names."""

    EMBED = "embed"  # ids -> residual stream
    PROJECT = "project"  # norm and QKV projection, whole batch, at the root
    SCATTER = "scatter"  # QKV rows, root -> owner
    ATTEND = "attend"  # rotary, append, attention of own rows, at each owner
    GATHER = "gather"  # attention outputs, owner -> root
    FINISH = "finish"  # output projection and MLP in one, TP degree 1
    OUTPUT = "output"  # output projection, a partial sum
    MLP = "mlp"  # norm and MLP, a partial sum
    ALL_REDUCE = "all_reduce"  # over the TP ranks of the node; OUTPUT, MLP: into the residual
    HANDOFF = "handoff"  # residual stream, root -> next root
    SAMPLE = "sample"  # final norm, head, draw; logits gathered at TP rank 0
    FEEDBACK = "feedback"  # sampled ids, sampler -> every rank of the first root


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows [start, stop) of `width` elements of `item_bytes` from `src` to `dst`."""

    src: Rank
    dst: Rank
    start: int
    stop: int
    width: int
    item_bytes: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.width

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.width * self.item_bytes

    @property
    def crosses_nodes(self) -> bool:
        return self.src.node != self.dst.node


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on rows [start, stop).

    `layer` is -1 where there is none. `sends` and `recvs` are posted together as one group.
    `operand_bytes`: size of an all-reduce operand on each rank.
    """

    kind: Kind
    start: int
    stop: int
    layer: int = -1
    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    operand_bytes: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start


Program = tuple[Op, ...]


def sent_bytes(program: Program, *, cross_node: bool) -> int:
    """Bytes that a rank sends point to point in one step, to other nodes or inside its own."""
    return sum(t.nbytes for op in program for t in op.sends if t.crosses_nodes is cross_node)
