"""The strategies, one file each, and the choice of a logical grid for one of them.

A new strategy is a member of `Strategy`, a class with `Rules` in a file here, a line in RULES, and,
where its programs are new, a generator beside `tknp.layout.rooted` (see docs/strategies.md).
"""

from __future__ import annotations

from collections.abc import Sequence

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

__all__ = ["RULES", "Grid", "NodeSpec", "Placement", "Rules", "check_options", "grid"]

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
    roles: Sequence[str] = (),
) -> Grid:
    """The logical grid of `strategy` on `nodes` machines of `tp` ranks; None: its own choice.

    `roles`: of each machine, decode-node, decode-root or attention-owner; empty: the first for all.
    Raises InvalidValue that names what can't be, why, and the nearest legal choice.
    """
    if nodes < 1 or tp < 1:
        name, value = ("nodes", nodes) if nodes < 1 else ("tp", tp)
        raise InvalidValue(name, value, "must be at least 1")
    check_options(
        strategy, kvp=kvp, copies=copies, microbatches=microbatches, width=width, overlap=overlap,
        inside=inside,
    )  # fmt: skip
    rules = RULES[strategy]
    if roles and "roles" not in rules.options:
        raise InvalidValue("roles", ",".join(roles), _missing(strategy, "roles"))
    if roles and len(roles) != nodes:
        raise InvalidValue("roles", ",".join(roles), f"give one for each of {nodes} nodes")
    asked = Asked(nodes, tp, kvp, copies, microbatches, width, overlap, inside, tuple(roles))
    chosen = rules.grid(config, asked)
    rules.check(config, chosen, chosen.specs(0))
    return chosen


def check_options(strategy: Strategy, **given: int | bool | None) -> None:
    """Refuse numbers below 1, and anything but 1 where `strategy` does not read the option."""
    options = RULES[strategy].options
    for name, value in given.items():
        if value is None or value is False:
            continue
        if value is not True and value < 1:
            raise InvalidValue(name, value, "must be at least 1")
        if name not in options and (value is True or value != 1):
            raise InvalidValue(name, value, _missing(strategy, name))


def _missing(strategy: Strategy, option: str) -> str:
    takers = ", ".join(s for s, rules in RULES.items() if option in rules.options)
    return f"{strategy} has no {option}: leave it out, or use {takers}"
