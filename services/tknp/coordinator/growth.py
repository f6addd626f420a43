"""Where a running request gets its next pages. Pure.

    its owners keep tokens together    a page at the owner whose turn comes without room, else
      (one owner, width k)             another of its owners takes the turns, else a further one
    all owners keep it (DCP, Helix)    a page at the owner whose turn comes without room
    owners keep layers (PP)            a page at every owner

Tokens that are stored stay where they are: what changes is who takes the tokens to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tknp.coordinator.division import Division
from tknp.coordinator.request import Request
from tknp.kv.holding import Key
from tknp.layout.owners import NodeLoad
from tknp.layout.shares import Shares


@dataclass(frozen=True, eq=False)
class Growth:
    """What `request` gets in its attempt `key`: a page at each of `nodes`, then `shares`.

    `further`: the node of them that owns nothing of it yet; None: there is none.
    """

    request: Request
    key: Key
    shares: Shares
    nodes: tuple[int, ...]
    further: int | None = None

    @property
    def pages(self) -> dict[int, int]:
        return dict.fromkeys(self.nodes, 1)


def starved(division: Division, loads: Sequence[NodeLoad], request: Request) -> tuple[int, ...]:
    """Nodes that have to make room if `request`, near the end of its pages, is to stay."""
    if division.divides != "tokens":
        return tuple(node for node in request.owners if loads[node].free < 1)
    return (request.shares.owner_at(request.covered),)


def find(division: Division, loads: Sequence[NodeLoad], request: Request) -> Growth | None:
    """The next growth of `request`; None: there is no page for it anywhere it could go."""
    if division.divides != "tokens":
        room = all(loads[node].free for node in request.owners)
        return _growth(request, request.shares, request.owners) if room else None
    full = request.shares.appender(request.covered)
    node = request.shares.owners[full]
    if loads[node].free:
        return _growth(request, request.shares, (node,))
    if division.together:
        return None
    return _elsewhere(division, loads, request, full)


def _elsewhere(
    division: Division, loads: Sequence[NodeLoad], request: Request, full: int
) -> Growth | None:
    """Other owners than shard `full` take the turns from the first token without room on."""
    shares, start = request.shares, request.covered
    others = [i for i in range(len(shares.owners)) if i != full]
    spare = [
        i for i in others
        if request.held[shares.owners[i]] * division.page_size > shares.length(i, start)
    ]  # fmt: skip
    if spare:
        return _growth(request, shares.grown((), start, tuple(spare)), ())
    roomy = [i for i in others if loads[shares.owners[i]].free]
    if roomy:
        least = min(roomy, key=lambda i: (loads[shares.owners[i]].used, i))
        return _growth(request, shares.grown((), start, (least,)), (shares.owners[least],))
    further = [
        node for node in division.streams[request.stream]
        if node not in shares.owners and loads[node].free
    ]  # fmt: skip
    if not further or len(shares.owners) >= division.width:
        return None
    node = min(further, key=lambda node: (loads[node].used, node))
    grown = shares.grown((node,), start, (len(shares.owners),))
    return _growth(request, grown, (node,), node)


def _growth(
    request: Request, shares: Shares, nodes: tuple[int, ...], further: int | None = None
) -> Growth:
    return Growth(request, request.key, shares, nodes, further)
