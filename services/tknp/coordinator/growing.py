"""Pages for requests that run: what to ask of owners, what came of it, who makes room. Pure.

near the end of its pages   -> ask -> Growth, its pages taken in the ledger
owners have answered        -> answered -> in the batch with the next step
it has left meanwhile, or   -> answered -> the further owner's page given back -> shrunk
  an owner refused
no page anywhere            -> the youngest that helps leaves; asked again as pages come back
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from tknp.coordinator.division import Division
from tknp.coordinator.growth import Growth, find, starved
from tknp.coordinator.ledger import Ledger
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.stream import Stream


class Growing:
    """`preempt(request)`: lets a running request leave the batch and wait for another attempt."""

    def __init__(
        self,
        division: Division,
        ledger: Ledger,
        streams: Sequence[Stream],
        preempt: Callable[[Request], None],
    ) -> None:
        self._division = division
        self._ledger = ledger
        self._streams = streams
        self._preempt = preempt
        self._asked: dict[Request, Growth] = {}

    def pending(self, request: Request) -> bool:
        """Whether owners are being asked for `request`."""
        return request in self._asked

    @property
    def starving(self) -> bool:
        """Whether a request near the end of its pages has not even asked for more."""
        return any(r not in self._asked for stream in self._streams for r in stream.hungry)

    def ask(self) -> list[Growth]:
        """What to ask of owners now."""
        found = []
        for stream in self._streams:
            for request in list(stream.hungry):
                growth = self._next(stream, request)
                if growth is not None:
                    found.append(growth)
        return found

    def answered(self, growth: Growth, given: Collection[int]) -> bool:
        """The nodes `given` have given their page; whether the request runs on with all of them."""
        request, stream = growth.request, self._streams[growth.request.stream]
        del self._asked[request]
        same = growth.key == request.key and bool(request.held)
        runs = same and request.stage is Stage.RUNNING and set(given) == set(growth.nodes)
        for node in growth.nodes:
            if node == growth.further and not runs:
                continue  # until `shrunk`
            if same and node in given:
                request.held[node] = request.held.get(node, 0) + 1
            else:
                self._ledger.give({node: 1})
        if not runs:
            return False
        if growth.further is not None:
            request.owners = growth.shares.owners
            stream.requests[growth.further] += 1
        request.shares = growth.shares
        request.cover(self._division)
        stream.grow(request)
        return True

    def shrunk(self, growth: Growth) -> None:
        """`growth.further` has released what it gave in vain."""
        if growth.further is not None:
            self._ledger.give({growth.further: 1})

    def _next(self, stream: Stream, request: Request) -> Growth | None:
        while request in stream.hungry and request not in self._asked:
            growth = find(self._division, self._ledger.loads, request)
            if growth is None:
                self._make_room(request)
                return None
            self._ledger.take(growth.pages)
            self._asked[request] = growth
            if growth.nodes:
                return growth
            self.answered(growth, ())  # its owners have room as it is
        return None

    def _make_room(self, request: Request) -> None:
        """Let the youngest request that would help leave, unless one is leaving already."""
        nodes = set(starved(self._division, self._ledger.loads, request))
        if any(nodes & r.held.keys() for stream in self._streams for r in stream.departing):
            return
        helps = [
            other for stream in self._streams for other in stream.running.values()
            if nodes & other.held.keys() and other.pinned is None and not other.preemptions
        ]  # fmt: skip
        self._preempt(max(helps, key=lambda r: (-r.priority, r.order), default=request))
