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
    streams = range(len(seats))
    widths = [division.fewest_owners_in(stream, pages, prompt, tokens) for stream in streams]
    fewest = min((width for width in widths if width is not None), default=None)
    if fewest is None:
        return None
    need = division.most_pages(fewest, prompt, tokens)
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for stream, seat in enumerate(seats):
        pinned_elsewhere = request.pinned is not None and request.pinned.stream != stream
        if not seat.slots or pinned_elsewhere or widths[stream] != fewest:
            continue
        owners = _owners(division, loads, seat, request, stream, fewest, need)
        if owners is not None:
            load = max(loads[node].used for node in owners)
            there = sum(seat.requests[node] for node in owners)
            found.append(((load, -seat.slots, there, stream), owners))
    if not found:
        return None
    (*_, stream), owners = min(found)
    shares = division.shares(owners, prompt)
    return Place(stream, owners, shares, tuple(division.pages(owners, shares, tokens)))


def _owners(
    division: Division,
    loads: Sequence[NodeLoad],
    seat: Seat,
    request: Request,
    stream: int,
    width: int,
    need: int,
) -> tuple[int, ...] | None:
    """The `width` least loaded nodes of `stream` with `need` pages, in order; None: too few."""
    nodes = division.streams[stream]
    if request.pinned is not None and not division.together:
        nodes = (request.pinned.node,)
    free = [node for node in nodes if loads[node].free >= need]
    if len(free) < width:
        return None
    if division.together:
        return division.streams[stream]
    free.sort(key=lambda node: (loads[node].used, seat.requests[node], node))
    return tuple(sorted(free[:width]))
