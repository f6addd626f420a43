"""Programs: what one rank does in one step of one stream, as data.

The engine executes a program, the planner prices it, tests count its bytes. Rows are half-open
ranges of the step's batch, whose order `tknp.layout.rows` fixes.

    ids --EMBED--> x
    x --PROJECT--> qkv --SCATTER or QUERY--> ATTEND --GATHER, EXCHANGE or REDUCE_SCATTER-->
        [MERGE] attention --FINISH or OUTPUT and MLP--> x [--HANDOFF-->]              each layer
    x --SAMPLE--> ids --FEEDBACK--> who embeds
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from tknp.layout.rank import Rank

ID_BYTES = 8
LOGIT_BYTES = 4
LSE_BYTES = 4

What = Literal["qkv", "q", "attention", "lse", "x", "logits", "ids"]
Scope = Literal["node", "pool"]


class Kind(StrEnum):
    """Operations, by the papers' names."""

    # Enum's own hash is a Python function, and every operation of a step is looked up by its kind.
    __hash__ = str.__hash__

    EMBED = "embed"  # ids -> residual stream
    PROJECT = "project"  # norm and QKV projection of the whole batch
    SCATTER = "scatter"  # QKV rows, root -> owners
    QUERY = "query"  # dcp: column slices of QKV rows, among ranks of equal t
    ATTEND = "attend"  # rotary, append, attention of rows kept here, whole or in part
    GATHER = "gather"  # attention outputs (and LSE where partial), owners -> root
    EXCHANGE = "exchange"  # helix: outputs' columns and LSE, all to all; posts, MERGE waits
    MERGE = "merge"  # partial outputs of `owners` -> attention, by LSE
    LSE_GATHER = "lse_gather"  # dcp: LSE among ranks of equal t; own output is scaled by it
    REDUCE_SCATTER = "reduce_scatter"  # dcp: scaled outputs' columns, summed where they belong
    FINISH = "finish"  # output projection and MLP in one, where nothing is partial
    OUTPUT = "output"  # output projection, a partial sum
    MLP = "mlp"  # norm and MLP, a partial sum
    ALL_REDUCE = "all_reduce"  # over the ranks of `scope`; OUTPUT, MLP: into the residual
    HANDOFF = "handoff"  # residual stream, root -> next root
    SAMPLE = "sample"  # final norm, head, draw; logits gathered at the sampling rank
    FEEDBACK = "feedback"  # sampled ids, sampling rank -> every rank that embeds


@dataclass(frozen=True, slots=True)
class Transfer:
    """Rows [start, stop) of `width` elements of `item_bytes` from `src` to `dst`.

    `what` moves; they are columns [column, column + width) of the sender's rows.
    `crosses_nodes`: the two ends are in different NVLink domains (see Layout.domain).
    """

    src: Rank
    dst: Rank
    start: int
    stop: int
    width: int
    item_bytes: int
    what: What = "x"
    column: int = 0
    crosses_nodes: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.width

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.width * self.item_bytes


@dataclass(frozen=True, slots=True)
class Op:
    """One operation on rows [start, stop).

    `layer` is -1 where there is none. `sends` and `recvs` are posted together as one group.
    `operand_bytes`: size of an all-reduce operand on each rank; `scope`: who reduces, the ranks of
    the node or all of the pool. `partial`: attention over a part of the rows' tokens, so that its
    LSE is needed. `owners`: of a MERGE, in the order in which their parts are summed.
    """

    kind: Kind
    start: int
    stop: int
    layer: int = -1
    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()
    operand_bytes: int = 0
    scope: Scope = "node"
    partial: bool = False
    owners: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.stop - self.start


Program = tuple[Op, ...]


def sent_bytes(program: Program, *, cross_node: bool) -> int:
    """Bytes that a rank sends point to point in one step, to other domains or inside its own."""
    return sum(t.nbytes for op in program for t in op.sends if t.crosses_nodes is cross_node)
