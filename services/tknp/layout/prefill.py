"""Programs of prefill: one chunk of one prompt on a replica of T' ranks.

A replica is a pool of one node that holds every layer, so a chunk is a decode step whose rows are
the chunk's tokens. Only the last row of the last chunk is sampled.
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
    body = tuple(op for op in program if op.kind not in (Kind.SAMPLE, Kind.FEEDBACK))
    if not last:
        return body
    sample = next(op for op in program if op.kind is Kind.SAMPLE)
    tail = tokens - 1

    def narrowed(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(replace(t, start=tail) for t in transfers)

    row = replace(sample, start=tail, sends=narrowed(sample.sends), recvs=narrowed(sample.recvs))
    return (*body, row)
