"""One decode step of every stream of a layout under a uniform load: rows, owners, programs.

TP ranks of a node differ in what they do with logits and ids alone, so programs are derived for two
of each node: rank 0, and rank 1, which stands for the others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from tknp.errors import InvalidValue
from tknp.layout.derive import derive
from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op, Program, Transfer
from tknp.layout.rank import Rank
from tknp.layout.rows import Group, arrange, fixed_groups

# What moves rows of attention between nodes, in every layer.
EXCHANGES = (
    Kind.SCATTER, Kind.GATHER, Kind.QUERY, Kind.EXCHANGE, Kind.LSE_GATHER, Kind.REDUCE_SCATTER,
)  # fmt: skip


@dataclass(frozen=True)
class Step:
    """`groups[s]`: rows of stream s. `context`: tokens of every request. `width`: its owners."""

    layout: Layout
    groups: tuple[tuple[Group, ...], ...]
    context: int
    width: int

    @property
    def batch(self) -> int:
        return sum(group.rows for groups in self.groups for group in groups)

    @cached_property
    def programs(self) -> tuple[dict[Rank, Program], ...]:
        """By stream, of ranks 0 and 1 of each node that takes part."""
        return tuple(
            {
                rank: derive(self.layout, stream, groups, rank)
                for rank in self.layout.ranks()
                if rank.t < 2 and rank.node in self.layout.members(stream)
            }
            for stream, groups in enumerate(self.groups)
        )

    @cached_property
    def tokens(self) -> tuple[tuple[float, ...], ...]:
        """`tokens[s][i]`: tokens that one owner of each of rows [0, i) of stream s keeps."""
        return tuple(
            (0.0, *accumulate(self._owned(group) for group in groups for _ in range(group.rows)))
            for groups in self.groups
        )

    def _owned(self, group: Group) -> float:
        share = len(group.owners) if self.layout.divides == "tokens" else 1
        return self.context / share

    def operations(self, *kinds: Kind) -> Iterable[tuple[int, Rank, Op]]:
        """(stream, rank, operation) of all programs, of `kinds` alone."""
        for stream, programs in enumerate(self.programs):
            for rank, program in programs.items():
                for op in program:
                    if op.kind in kinds:
                        yield stream, rank, op

    def transfers(self, *kinds: Kind) -> Iterable[tuple[int, Op, Transfer]]:
        """(stream, operation, transfer) of everything that is sent, of `kinds` alone."""
        for stream, _, op in self.operations(*kinds):
            for transfer in op.sends:
                yield stream, op, transfer


def make_step(layout: Layout, batch: int, context: int, width: int = 1) -> Step:
    """`batch` requests of `context` tokens, spread evenly over streams, owners and appenders.

    `width`: owners of each request, where the strategy leaves a choice.
    """
    for field, value in (("batch", batch), ("context", context)):
        if value < 1:
            raise InvalidValue(field, value, "must be at least 1")
    if not 1 <= width <= layout.width:
        raise InvalidValue(
            "width", width, f"this layout gives a request 1 to {layout.width} owners"
        )
    groups = []
    for stream in range(layout.streams):
        rows = {
            slot: _placed(layout, stream, slot, width)
            for slot in range(len(range(stream, batch, layout.streams)))
        }
        groups.append(tuple(arrange(layout, rows)[1]))
    return Step(layout, tuple(groups), context, width)


def _placed(layout: Layout, stream: int, index: int, width: int) -> tuple[tuple[int, ...], int]:
    """Owners and appender of request `index` of a stream."""
    nodes = layout.owners[stream]
    if fixed_groups(layout):
        return nodes, nodes[0]
    owners = tuple(nodes[(index + i) % len(nodes)] for i in range(width))
    return owners, owners[index // len(nodes) % width]
