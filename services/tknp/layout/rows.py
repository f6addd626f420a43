"""In which order the rows of a step stand, and who owns them. Pure.

    narrow rows, by owner, then slot | wide rows, by (owners, appender), then slot

so that what a node owns alone is contiguous, and wide rows with the same traffic are together.
Where a row's owners follow from the layout (all nodes: pp, dcp, helix; one: tp) there is a single
group in order of slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import NamedTuple

from tknp.errors import InvalidValue
from tknp.layout.layout import Layout


class Group(NamedTuple):
    """`rows` adjacent rows with equal `owners`, in shard order; node `appender` keeps their token.

    `appender` has no meaning where the layout alone says who appends.
    """

    owners: tuple[int, ...]
    appender: int
    rows: int

    @property
    def wide(self) -> bool:
        """Whether several owners each hold a part of the sequence."""
        return len(self.owners) > 1


def arrange(
    layout: Layout, rows: Mapping[int, tuple[tuple[int, ...], int]]
) -> tuple[tuple[int, ...], tuple[Group, ...]]:
    """Order of slots and groups of a step from {slot: (owners, appender)}."""
    if not rows:
        return (), ()
    if fixed_groups(layout):
        everyone = Group(layout.owners[0], layout.owners[0][0], len(rows))
        return tuple(sorted(rows)), (everyone,)
    order = sorted(rows, key=lambda slot: (_place(*rows[slot]), slot))
    groups = [
        Group(owners, appender, len(list(slots)))
        for (owners, appender), slots in groupby(order, key=lambda slot: rows[slot])
    ]
    return tuple(order), tuple(groups)


def fixed_groups(layout: Layout) -> bool:
    """Whether the layout alone says who owns what of a row."""
    return layout.spread or layout.divides != "tokens"


def check_groups(layout: Layout, stream: int, groups: tuple[Group, ...]) -> None:
    """Raise InvalidValue unless `groups` is what `arrange` gives for rows of `stream`."""
    legal = layout.owners[stream]
    if fixed_groups(layout):
        if len(groups) <= 1 and all(g.owners == legal and g.rows > 0 for g in groups):
            return
        raise InvalidValue("groups", groups, f"give one group of owners {legal}")
    for group in groups:
        each = set(group.owners)
        if not each or len(each) != len(group.owners) or not each <= set(legal):
            remedy = f"stream {stream} has owners {legal}"
            raise InvalidValue("groups", group, remedy)
        if group.appender not in each or group.rows < 1:
            raise InvalidValue("groups", group, "an owner appends, and a group has rows")
    places = [_place(group.owners, group.appender) for group in groups]
    if places != sorted(set(places)):
        raise InvalidValue("groups", groups, "give them in the order of `arrange`, each once")


def _place(owners: tuple[int, ...], appender: int) -> tuple[bool, tuple[int, ...], int]:
    return len(owners) > 1, owners, appender
