"""The strategies, one file each, and the choice of a logical grid for one of them.

A new strategy is a member of `Strategy`, a class with `Rules` in a file here, a line in RULES, and,
where its programs are new, a generator beside `tknp.layout.rooted` (see docs/strategies.md).
"""

from __future__ import annotations

from dataclasses import fields

from tknp.errors import InvalidValue
from tknp.layout.strategies.base import Asked, Grid, NodeSpec, Placement, Rules
from tknp.layout.strategies.dcp import Dcp
from tknp.layout.strategies.dp import Dp
from tknp.layout.strategies.helix import Helix
from tknp.layout.strategies.pp import Pp
from tknp.layout.strategies.tknp import Tknp
from tknp.layout.strategies.tp import Tp
from tknp.layout.strategy import Strategy
from tknp.model.config import ModelConfig

__all__ = ["RULES", "Grid", "NodeSpec", "Placement", "Rules", "grid"]

RULES: dict[Strategy, Rules] = {
    Strategy.TKNP: Tknp(),
    Strategy.DP: Dp(),
    Strategy.TP: Tp(),
    Strategy.PP: Pp(),
    Strategy.DCP: Dcp(),
    Strategy.HELIX: Helix(),
}


def grid(
    config: ModelConfig,
    strategy: Strategy,
    *,
    nodes: int,
    tp: int,
    kvp: int | None = None,
    copies: int | None = None,
    microbatches: int | None = None,
    width: int | None = None,
    overlap: int | None = None,
    inside: bool | None = None,
) -> Grid:
    """The logical grid of `strategy` on `nodes` machines of `tp` ranks; None: its own choice.

    Raises InvalidValue that names what can't be, why, and the nearest legal choice.
    """
    asked = Asked(nodes, tp, kvp, copies, microbatches, width, overlap, inside)
    rules = RULES[strategy]
    for field in fields(asked):
        value = getattr(asked, field.name)
        if value is None or isinstance(value, bool):
            continue
        if value < 1:
            raise InvalidValue(field.name, value, "must be at least 1")
    for name in sorted({f.name for f in fields(asked)} - {"nodes", "tp"} - rules.options):
        value = getattr(asked, name)
        if value not in (None, False) and (name, value) not in (("copies", 1), ("overlap", 1)):
            takers = ", ".join(s for s, other in RULES.items() if name in other.options)
            raise InvalidValue(
                name, value, f"{strategy} has no {name}: leave it out, or use {takers}"
            )
    chosen = rules.grid(config, asked)
    rules.check(config, chosen, chosen.specs(0))
    return chosen
