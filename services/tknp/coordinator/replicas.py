"""Which prefill replica computes a prompt: the one with the fewest prompt tokens under way.

A replica is usable while all its ranks answer, are ready and fit the pool. All are asked every
second, so that one that comes while the pool runs is used soon and one that goes is not. One that
loses a request is asked at once how it is, and is used again as soon as it answers: either it is
well or another process has taken its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tknp.coordinator.startup import Peer
from tknp.errors import Unavailable


class Replicas:
    """`ranks[p]`: the processes of replica p."""

    def __init__(self, ranks: Sequence[Sequence[Peer]]) -> None:
        self.ranks = ranks
        self.requests = [0] * len(ranks)
        self._tokens = [0] * len(ranks)

    def take(self, prompt_tokens: int, lost_at: Mapping[int, str]) -> int:
        """A usable replica, not one of `lost_at` (replica -> reason), counted busy until `give`.

        Raises Unavailable saying of each why it can't be used.
        """
        reasons = [self._why_not(p, lost_at) for p in range(len(self.ranks))]
        usable = [p for p, reason in enumerate(reasons) if not reason]
        if not usable:
            raise Unavailable(f"no prefill replica is left: {'; '.join(reasons)}")
        chosen = min(usable, key=lambda p: (self._tokens[p], p))
        self.requests[chosen] += 1
        self._tokens[chosen] += prompt_tokens
        return chosen

    def give(self, replica: int, prompt_tokens: int) -> None:
        """The request that was taken for `replica` is over there."""
        self.requests[replica] -= 1
        self._tokens[replica] -= prompt_tokens

    def lost(self, replica: int, reason: str) -> None:
        """A request was lost at `replica`; it is out of use until it has answered again."""
        for peer in self.ranks[replica]:
            peer.lost = reason

    def _why_not(self, replica: int, lost_at: Mapping[int, str]) -> str:
        for peer in self.ranks[replica]:
            if peer.trouble:
                return f"{peer.name} at {peer.address}: {peer.trouble}"
        return lost_at.get(replica, "")
