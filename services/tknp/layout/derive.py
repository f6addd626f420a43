"""From a layout and the owners of a step's rows to each rank's program."""

from __future__ import annotations

from collections.abc import Sequence

from tknp.errors import InvalidValue
from tknp.layout import dcp, helix, rooted, spread
from tknp.layout.layout import Layout
from tknp.layout.program import Program
from tknp.layout.rank import Rank
from tknp.layout.rows import Group, check_groups
from tknp.layout.strategy import Strategy

_SPREAD: dict[Strategy, spread.Attention] = {
    Strategy.DCP: dcp.attention,
    Strategy.HELIX: helix.attention,
}


def derive(layout: Layout, stream: int, groups: Sequence[Group], rank: Rank) -> Program:
    """Program of `rank` for a step of `stream` whose rows stand in `groups`; empty without rows.

    Ranks that derive from equal arguments agree on every transfer and its order. A rank outside
    `layout.members(stream)` has nothing to do. Raises InvalidValue for groups that `arrange` does
    not give.
    """
    if not 0 <= stream < layout.streams:
        raise InvalidValue("stream", stream, f"the layout has {layout.streams} streams")
    groups = tuple(groups)
    check_groups(layout, stream, groups)
    batch = sum(group.rows for group in groups)
    if not batch:
        return ()
    if layout.spread:
        attention = _SPREAD[layout.strategy]
        return tuple(spread.operations(layout, batch, rank, attention))
    return tuple(rooted.operations(layout, stream, groups, rank))
