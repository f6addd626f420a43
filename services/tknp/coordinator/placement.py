"""Which stream a request joins and which nodes own it. Pure.

Source: Decode Token Parallelism, section 4.2, capacity-aware request assignment: of the nodes whose
free pages hold the input and the expected output, those with the lowest KV load. A request has as
few owners as could ever hold it, so it waits for one node where one will do. Among equal loads the
stream with the fewest requests goes first, and in it the node with the fewest of its requests: that
spreads every microbatch over all owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tknp.coordinator.division import Division
from tknp.coordinator.request import Request
from tknp.layout.owners import NodeLoad
from tknp.layout.shares import Shares


@dataclass(frozen=True)
class Seat:
    """What is free in one stream: `slots`; and `requests` at each node that it has there."""

    slots: int
    requests: Sequence[int]


@dataclass(frozen=True)
class Place:
    """`pages`: of each of `owners`."""

    stream: int
    owners: tuple[int, ...]
    shares: Shares
    pages: tuple[int, ...]


def choose(
    division: Division,
    loads: Sequence[NodeLoad],
    seats: Sequence[Seat],
    request: Request,
    tokens: int,
) -> Place | None:
    """Where `request` goes with room for `tokens`; None: it waits."""
    pages = [load.pages for load in loads]
    prompt = request.tokens
    best: tuple[tuple[int, ...], Place] | None = None
    fewest = division.fewest_owners(pages, prompt, tokens)
    for stream, seat in enumerate(seats):
        if not seat.slots or (request.pinned is not None and request.pinned.stream != stream):
            continue
        width = division.fewest_owners_in(stream, pages, prompt, tokens)
        if width is None or width != fewest:
            continue
        owners = _owners(division, loads, seat, request, stream, width, tokens)
        if owners is None:
            continue
        shares = division.shares(owners, prompt)
        rank = (
            max(loads[node].used for node in owners), -seat.slots,
            sum(seat.requests[node] for node in owners), stream,
        )  # fmt: skip
        if best is None or rank < best[0]:
            needs = division.pages(owners, shares, tokens)
            best = rank, Place(stream, owners, shares, tuple(needs))
    return None if best is None else best[1]


def _owners(
    division: Division,
    loads: Sequence[NodeLoad],
    seat: Seat,
    request: Request,
    stream: int,
    width: int,
    tokens: int,
) -> tuple[int, ...] | None:
    """The `width` least loaded nodes of `stream` with room, in their order; None: too few."""
    nodes = division.streams[stream]
    need = max(division.pages(range(width), division.shares(range(width), request.tokens), tokens))
    if request.pinned is not None and not division.together:
        nodes = (request.pinned.node,)
    free = [node for node in nodes if loads[node].free >= need]
    if len(free) < width:
        return None
    if division.together:
        return division.streams[stream]
    free.sort(key=lambda node: (loads[node].used, seat.requests[node], node))
    return tuple(sorted(free[:width]))
