"""Programs of prefill: one chunk of one prompt on a replica of T' ranks.

A replica is a pool of one node that holds every layer, so a chunk is a decode step whose rows are
the chunk's tokens. Only the last row of the last chunk is sampled: no other goes beyond the
attention of the last layer, which fills the last pages.
"""

from __future__ import annotations

from dataclasses import replace

from tknp.errors import InvalidValue
from tknp.layout.derive import derive
from tknp.layout.layout import Layout, NodeSpec, make_layout
from tknp.layout.program import Kind, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.rows import Group
from tknp.model.config import DType, ModelConfig


def replica_layout(config: ModelConfig, dtype: DType, tp: int) -> Layout:
    """The layout of a prefill replica of `tp` ranks."""
    return make_layout(config, dtype, tp, [NodeSpec(memory_bytes=0)])


def derive_chunk(layout: Layout, tokens: int, t: int, *, last: bool) -> Program:
    """Program of TP rank `t` for a chunk of `tokens`; `last` ends with a sample of its last row."""
    if tokens < 1:
        raise InvalidValue("tokens", tokens, "a chunk has at least one token")
    program = derive(layout, 0, (Group((0,), 0, tokens),), Rank(0, t))
    whole = 1 + max(at for at, op in enumerate(program) if op.kind is Kind.ATTEND)
    if not last:
        return program[:whole]
    tail = tokens - 1

    def narrowed(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(t, start=tail) for t in transfers)

    rest = (
        replace(
            op, start=tail, sends=narrowed(op.sends), recvs=narrowed(op.recvs),
            operand_bytes=op.operand_bytes // tokens,
        )
        for op in program[whole:]
        if op.kind is not Kind.FEEDBACK
    )  # fmt: skip
    return (*program[:whole], *rest)
