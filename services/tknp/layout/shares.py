"""Which of a request's tokens each of its owners keeps. Pure; the same on every process.

The prompt is cut into contiguous parts; generated tokens go round robin, `interleave` each (Helix,
staggered KV concatenation), from any position on over other shards:

    owners (4, 1), prompt 5, interleave 2, grown at position 9 onto shard 1 alone:

    position   0 1 2 3 4 | 5 6 7 8 | 9 10 11
    shard      0 0 0 1 1 | 0 0 1 1 | 1  1  1
    slot       0 1 2 0 1 | 3 4 2 3 | 4  5  6

The slot of a token is its index among the tokens that its owner keeps; page and offset follow from
it. One owner keeps every token at the slot of its position.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from tknp.errors import InvalidValue


class Phase(NamedTuple):
    """From position `start` on, generated tokens go round robin over `shards` (indices)."""

    start: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class Shares:
    """A request whose shard i is kept by node `owners[i]`.

    `prompt`: tokens that are there before the first step; the shards of the first phase hold them,
    contiguous and equal up to rounding, empty for the last where there are too few. Parts begin at
    multiples of `unit` tokens: a page that prefill computes is a page of one owner. A later phase
    rules from its start on, also one that begins at the prompt's end. Without `phases` one phase
    begins there over all owners. Raises InvalidValue for anything else.
    """

    owners: tuple[int, ...]
    prompt: int
    interleave: int = 16
    phases: tuple[Phase, ...] = ()
    unit: int = 1

    def __post_init__(self) -> None:
        if not self.owners or len(set(self.owners)) != len(self.owners):
            raise InvalidValue("owners", self.owners, "give one node or several, each once")
        if self.prompt < 0:
            raise InvalidValue("prompt", self.prompt, "must not be negative")
        if self.interleave < 1:
            raise InvalidValue("interleave", self.interleave, "must be at least 1 token")
        if self.unit < 1:
            raise InvalidValue("unit", self.unit, "must be at least 1 token")
        if not self.phases:
            everyone = Phase(self.prompt, tuple(range(len(self.owners))))
            object.__setattr__(self, "phases", (everyone,))
        first = self.phases[0]
        if first != (self.prompt, tuple(range(len(first.shards)))):
            raise InvalidValue(
                "phases[0]", first, f"must begin at {self.prompt} and count shards from 0"
            )
        for i, phase in enumerate(self.phases):
            known = set(phase.shards) <= set(range(len(self.owners)))
            if not phase.shards or len(set(phase.shards)) != len(phase.shards) or not known:
                raise InvalidValue(
                    f"phases[{i}].shards", phase.shards,
                    f"name shards 0 to {len(self.owners) - 1}, each once",
                )  # fmt: skip
        if any(before.start > after.start for before, after in pairwise(self.phases)):
            raise InvalidValue("phases", self.phases, "must be in order of their start")

    def prompt_span(self, shard: int) -> range:
        """Positions of the prompt that `shard` keeps."""
        sharing = len(self.phases[0].shards)
        if shard >= sharing:
            return range(self.prompt, self.prompt)
        size = self._part
        return range(min(shard * size, self.prompt), min((shard + 1) * size, self.prompt))

    @property
    def _part(self) -> int:
        """Tokens of the prompt that each shard keeps, the last ones fewer."""
        units = -(-self.prompt // self.unit)
        return -(-units // len(self.phases[0].shards)) * self.unit

    def appender(self, position: int) -> int:
        """Shard that keeps the token at `position`."""
        if position < self.prompt:
            return position // self._part
        phase = next(phase for phase in reversed(self.phases) if phase.start <= position)
        turn = (position - phase.start) // self.interleave
        return phase.shards[turn % len(phase.shards)]

    def owner_at(self, position: int) -> int:
        """Node that keeps the token at `position`."""
        return self.owners[self.appender(position)]

    def length(self, shard: int, tokens: int) -> int:
        """Tokens that `shard` keeps of the first `tokens`."""
        span = self.prompt_span(shard)
        total = max(min(span.stop, tokens) - span.start, 0)
        stops = [phase.start for phase in self.phases[1:]] + [tokens]
        for phase, stop in zip(self.phases, stops, strict=True):
            count = min(stop, tokens) - phase.start
            if count > 0 and shard in phase.shards:
                rounds, rest = divmod(count, self.interleave * len(phase.shards))
                begun = rest - phase.shards.index(shard) * self.interleave
                total += rounds * self.interleave + min(max(begun, 0), self.interleave)
        return total

    def slot(self, position: int) -> int:
        """Index of the token at `position` among those that its owner keeps."""
        return self.length(self.appender(position), position)

    def shard_of(self, node: int) -> int | None:
        """Index of the shard that `node` keeps, or None."""
        return self.owners.index(node) if node in self.owners else None

    def grown(self, owners: tuple[int, ...], start: int, shards: tuple[int, ...]) -> Shares:
        """The same with `owners` added behind, and `shards` taking turns from `start` on.

        Tokens before `start` keep their owners and slots. Raises InvalidValue when `start` is
        before a phase that has begun.
        """
        if start < self.phases[-1].start:
            raise InvalidValue(
                "start", start, f"must be {self.phases[-1].start} or later, the last phase's start"
            )
        phases = (*self.phases, Phase(start, shards))
        return replace(self, owners=self.owners + owners, phases=phases)
