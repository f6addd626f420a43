"""Operations of attention whose sequences are divided over nodes (width k, DCP, Helix).

    QUERY           columns of q, k, v of every node -> rows of this rank's heads
    EXCHANGE        posts columns of partial outputs, with LSE; the MERGE of the same rows waits
    MERGE           partial outputs, own and received, in the order of owners -> attention
    LSE_GATHER      LSE of every node -> own output weighted by its share of the softmax
    REDUCE_SCATTER  weighted outputs' columns of every node, summed in node order -> attention

Merges and sums are in float32 and in a fixed order, so a row's result doesn't depend on who waits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tknp.attention.merge import merge_columns, weighted
from tknp.engine.tensors import Tensors
from tknp.layout.layout import Layout
from tknp.layout.program import Op, Transfer
from tknp.layout.rank import Rank
from tknp.transport.base import Message, Transport, Work


class SequenceOperations:
    """Of one stream on `rank`; they start and, once what they returned was waited for, complete."""

    def __init__(
        self, layout: Layout, rank: Rank, tensors: Tensors, transport: Transport, stream: int
    ) -> None:
        self._layout = layout
        self._rank = rank
        self._tensors = tensors
        self._transport = transport
        self._stream = stream
        self._sending: list[Message] = []  # of what is waited for at once
        # Posted and not waited for, by their first row; messages are kept alive with their works.
        self._exchanges: dict[int, tuple[Work, list[Message]]] = {}

    def start_query(self, op: Op) -> Work:
        sends = [(t.dst, self._tensors.qkv) for t in op.sends]
        return self._post(op, sends)

    def complete_query(self, op: Op) -> None:
        rows = self._tensors.qkv_rows[: op.stop]
        self._place(rows, self._rank, self._tensors.qkv)
        for t in op.recvs:
            self._place(rows, t.src, self._tensors.arrives(t))
        self._tensors.qkv = rows

    def start_exchange(self, op: Op) -> None:
        out, lse = self._tensors.out_of(op.start)
        sends = [
            (t.dst, _columns(lse if t.what == "lse" else out, t).contiguous()) for t in op.sends
        ]
        self._exchanges[op.start] = self._post(op, sends), sends

    def start_merge(self, op: Op) -> Work | None:
        found = self._exchanges.get(op.start)
        return found[0] if found is not None else None

    def complete_merge(self, op: Op) -> None:
        tensors, own = self._tensors, self._tensors.heads
        columns, size = own.output_columns, own.config.head_dim
        heads = slice(columns.start // size, -(-columns.stop // size))
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        self._exchanges.pop(op.start, None)
        for node in op.owners:
            if node == self._rank.node:
                out, lse = tensors.out_of(op.start)
                out, lse = out[:, columns.start : columns.stop], lse[:, heads]
            else:
                source = Rank(node, self._rank.t)
                rows = slice(op.start, op.stop)
                out = tensors.buffer("attention", len(columns), source)[rows]
                lse = tensors.buffer("lse", heads.stop - heads.start, source)[rows]
            outs.append(out)
            lses.append(lse)
        tensors.attention_rows[op.start : op.stop] = merge_columns(outs, lses, columns, size)
        tensors.attention = tensors.attention_rows[: len(tensors.x)]

    def start_lse_gather(self, op: Op) -> Work:
        _, lse = self._tensors.out_of(op.start)
        lse = lse.contiguous()
        return self._post(op, [(t.dst, lse) for t in op.sends])

    def complete_lse_gather(self, op: Op) -> None:
        out, own = self._tensors.out_of(op.start)
        lses = {t.src.node: self._tensors.arrives(t) for t in op.recvs}
        lses[self._rank.node] = own
        in_order = [lses[node] for node in sorted(lses)]
        scaled = weighted(out, in_order, sorted(lses).index(self._rank.node))
        self._tensors.outs[op.start] = scaled, own

    def start_reduce_scatter(self, op: Op) -> Work:
        out, _ = self._tensors.out_of(op.start)
        # A cast copies unless it has nothing to do; columns of rows are not contiguous.
        sends = [(t.dst, _columns(out, t).to(self._tensors.dtype).contiguous()) for t in op.sends]
        return self._post(op, sends)

    def complete_reduce_scatter(self, op: Op) -> None:
        tensors, columns = self._tensors, self._tensors.heads.output_columns
        out, _ = tensors.out_of(op.start)
        parts = {t.src.node: tensors.arrives(t).float() for t in op.recvs}
        parts[self._rank.node] = out[:, columns.start : columns.stop]
        total = torch.zeros_like(parts[self._rank.node])
        for node in sorted(parts):
            total += parts[node]
        tensors.attention = total.to(tensors.dtype)

    def _post(self, op: Op, sends: list[Message]) -> Work:
        recvs = [(t.src, self._tensors.arrives(t)) for t in op.recvs]
        self._sending = sends
        return self._transport.post(sends, recvs, stream=self._stream)

    def _place(self, rows: Tensor, source: Rank, projected: Tensor) -> None:
        """Copy the columns of q, k and v that `source` has projected to their places in `rows`."""
        shard, own = self._layout.heads(source), self._tensors.heads
        at = 0
        for first, columns in (
            (0, shard.q_columns),
            (own.q_width, shard.kv_columns),
            (own.q_width + own.kv_width, shard.kv_columns),
        ):
            here = slice(first + columns.start, first + columns.stop)
            rows[:, here] = projected[:, at : at + len(columns)]
            at += len(columns)


def _columns(rows: Tensor, transfer: Transfer) -> Tensor:
    return rows[:, transfer.column : transfer.column + transfer.width]
