"""One request as the coordinator knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tknp.coordinator.division import Division
from tknp.errors import TknpError
from tknp.kv.holding import Key
from tknp.layout.shares import Shares
from tknp.rpc.tracing import TRACE, Trace
from tknp.sampling.params import SamplingParams
from tknp.v1.common_pb2 import FinishReason, Token

NO_DEADLINE_S = float("inf")
NOWHERE = Shares((-1,), 0)


class Stage(StrEnum):
    """Where a request is; see the package docstring."""

    QUEUED = "queued"
    PLACED = "placed"
    READY = "ready"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"


class Pin(NamedTuple):
    """Where a request of the warm-up has to run: owner `node` of `stream`."""

    stream: int
    node: int


@dataclass(frozen=True, slots=True)
class Event:
    """What a client sees next: tokens, with `finish` on the last event, or an error."""

    tokens: tuple[Token, ...] = ()
    finish: FinishReason.ValueType | None = None
    error: TknpError | None = None


@dataclass(eq=False, slots=True)
class Request:
    """Prompt and sampling never change; the scheduler alone changes what stands below `pinned`.

    `priority`: higher goes first. `deadline_s`: when it fails unless it has ended, on the
    coordinator's clock as all times. `given`: how many of `generated` came with it, from an earlier
    life of the pool. `order`: its place in the order of arrival. `stops`: ids that end it. `name`:
    what its client calls it, any text; for logs. `together`: how many tokens its client is told of
    at once, but for the first one and the last ones.

    Set where it is placed: `stream`, and `slot`, its row there; `owners`, and `shares`, how they
    divide its tokens; `held`, pages of each owner that are counted for it; `covered`, the first
    position that these have no room for; `preemptions`, how often it made room for another.
    `trace`: what it belongs to. `untold`: tokens that its client doesn't know yet. While it runs,
    step s feeds position `joined` + s.
    """

    key: Key
    prompt: Sequence[int]
    params: SamplingParams
    arrived_s: float
    priority: int = 0
    deadline_s: float = NO_DEADLINE_S
    pinned: Pin | None = None
    given: int = 0
    order: int = -1
    stops: frozenset[int] = frozenset()
    stage: Stage = Stage.QUEUED
    stream: int = -1
    slot: int = -1
    shares: Shares = NOWHERE
    owners: tuple[int, ...] = ()
    held: dict[int, int] = field(default_factory=dict)
    covered: int = 0
    joined: int = 0
    preemptions: int = 0
    generated: list[int] = field(default_factory=list)
    placed_s: float = 0.0
    first_token_s: float = 0.0
    token_s: float = 0.0
    untold: list[Token] = field(default_factory=list)
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    trace: Trace = field(default_factory=TRACE.get)
    name: str = ""
    together: int = 1

    def cover(self, division: Division) -> None:
        """Note how far the pages that are held reach."""
        held = [self.held[node] for node in self.owners]
        self.covered = division.covered(self.shares, held, self.most_tokens)

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def tokens(self) -> int:
        """Tokens so far: what prefill computes, in another attempt the generated ones too."""
        return len(self.prompt) + len(self.generated)

    @property
    def most_tokens(self) -> int:
        """KV slots for the input, the whole output, and one discarded lookahead row."""
        return len(self.prompt) + self.params.max_tokens
