"""`derive` for callers that still count rows by node."""

from __future__ import annotations

from collections.abc import Sequence

from tknp.layout.derive import derive as derive_groups
from tknp.layout.layout import Layout
from tknp.layout.program import Program
from tknp.layout.rank import Rank
from tknp.layout.rows import Group


def derive(layout: Layout, rows: Sequence[int], rank: Rank) -> Program:
    groups = [Group((node,), node, count) for node, count in enumerate(rows) if count]
    return derive_groups(layout, 0, groups, rank)
