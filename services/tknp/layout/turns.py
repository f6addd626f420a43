"""Whose dense work has its turn at a node: an order over all streams that every rank derives alike.

A *visit* is a range of consecutive layers that a step roots at one node; drawing tokens counts as
the layer after the last. Every visit of every step has a virtual time, counted in layers:

    turn · L + first layer of the visit + phase

Turns number the steps of all streams alike. Streams with the same roots are L / m apart in phase,
streams with different ones (dual active roots) together. A node takes its visits in this order, one
after another, so that each of m streams roots another block:

    offset microbatches A, B      node 0   A0 ███      B0 ███      A1 ███
    (12 + 18 layers)              node 1        A0 ████     B0 ████     A1
    dual active roots             node 0   A0 ███ B0 ████ A1 ███ B1 ████
                                  node 1   B0 ███ A0 ████ B1 ███ A1 ████

Streams that have fallen out of it, say because both began at once, return to it by themselves:
whoever comes too early waits. Without the order two streams at one root take turns layer by layer
while the other node has nothing to root, and stay so.

Of several computations that are ready at a node the first of these goes on; so the roots of
several streams fall into step, layer by layer, and each finds the other's attention done when its
own is:

    1. looking up embeddings, projecting QKV: short, and other owners wait for the rows
    2. attention for another root, which waits for it
    3. attention for this root
    4. what is left of a layer, and parts of the head

Dense work of another visit than the earliest one waits, also if nothing else is ready.

Nothing waits for ever. Steps come to all ranks in one order (`coordinator.steps`), turns follow
from that alone, so virtual times are the same everywhere. Of all visits that are not over, the
earliest waits for no other one; what it needs of other nodes is attention and messages, which are
never held back. So it ends, and the next one is the earliest. A rank that has not yet been told of
a step can let a later one go first; the earlier one then overtakes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from tknp.layout.layout import Layout
from tknp.layout.program import Kind, Op

DENSE = frozenset(
    {Kind.EMBED, Kind.PROJECT, Kind.FINISH, Kind.OUTPUT, Kind.MLP, Kind.SAMPLE}
)  # fmt: skip
_SHORT = (Kind.EMBED, Kind.PROJECT)
_LOOKAHEAD = 1  # steps of a stream that are queued behind the one under way

VirtualTime = tuple[float, int]
"""Layers, then the stream, which decides between equal ones."""
Known = tuple[int, int, Op | None]
"""A step: its stream, its turn, and the operation under way, None before the first one."""


class Turns:
    """Of one node.

    `routes[s]`: root of each layer for stream s; `samplers[s]`: the node that draws its tokens.
    """

    @classmethod
    def of(cls, layout: Layout, node: int) -> Turns:
        """The turns of `node` in `layout`: what the engine takes and the planner predicts."""
        samplers = [layout.sampler(stream) for stream in range(layout.streams)]
        return cls(layout.routes, samplers, node)

    def __init__(self, routes: Sequence[Sequence[int]], samplers: Sequence[int], node: int) -> None:
        self._layers = len(routes[0])
        self._rooted = [[root == node for root in route] for route in routes]
        self._last: dict[int, int] = {}
        self._visits: list[list[tuple[int, int]]] = []
        self._phases: list[float] = []
        alike, before = Counter(map(tuple, routes)), Counter[tuple[int, ...]]()
        for route, sampler in zip(routes, samplers, strict=True):
            self._visits.append(_visits([*route, sampler], node))
            key = tuple(route)
            self._phases.append(before[key] * self._layers / alike[key])
            before[key] += 1

    def next_turn(self, stream: int) -> int:
        """The turn of the step of `stream` that has just come. Call it in the order of steps.

        A stream that has paused goes on where the others are.
        """
        others = max(self._last.values(), default=0) - _LOOKAHEAD
        turn = self._last[stream] = max(self._last.get(stream, -1) + 1, others)
        return turn

    def time(self, stream: int, turn: int, op: Op | None) -> VirtualTime | None:
        """Of the first visit to this node that is not over when `op` is under way.

        `op`: None before the first one. Of step `turn` of `stream`; None if it visits no more.
        """
        at = 0 if op is None else self._layer(op)
        for start, stop in self._visits[stream]:
            if stop > at:
                return turn * self._layers + start + self._phases[stream], stream
        return None

    def place(self, stream: int, op: Op) -> int:
        """Where the computation `op` of `stream` stands among those that are ready, 1 to 4."""
        if op.kind not in DENSE:
            return 3 if self._rooted[stream][op.layer] else 2
        return 1 if op.kind in _SHORT else 4

    def choose(
        self, steps: Iterable[Known], ready: Iterable[tuple[int, int, Op]]
    ) -> int | None:  # fmt: skip
        """The stream that computes now, of `ready` (stream, turn, operation); None if none may.

        `steps`: all that are known here and not over, whose order matters.
        """
        times = [self.time(*step) for step in steps]
        first = min((time for time in times if time is not None), default=(0.0, -1))[1]
        allowed = [
            (self.place(stream, op), turn, stream)
            for stream, turn, op in ready
            if stream == first or op.kind not in DENSE
        ]
        return min(allowed)[2] if allowed else None

    def _layer(self, op: Op) -> int:
        if op.kind is Kind.EMBED:
            return 0
        if op.layer >= 0:
            return op.layer
        return self._layers + (op.kind is Kind.FEEDBACK)


def _visits(route: Sequence[int], node: int) -> list[tuple[int, int]]:
    """Ranges of consecutive layers of `route` at `node`."""
    found: list[tuple[int, int]] = []
    for layer, root in enumerate(route):
        if root != node:
            continue
        if found and found[-1][1] == layer:
            found[-1] = found[-1][0], layer + 1
        else:
            found.append((layer, layer + 1))
    return found
