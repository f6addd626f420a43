"""One request as the coordinator knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tknp.errors import TknpError
from tknp.kv.holding import Key
from tknp.sampling.params import SamplingParams
from tknp.v1.common_pb2 import FinishReason, Token

NO_DEADLINE_S = float("inf")


class Stage(StrEnum):
    """Where a request is; see the package docstring."""

    QUEUED = "queued"
    PLACED = "placed"
    READY = "ready"
    RUNNING = "running"
    ENDED = "ended"


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
    coordinator's clock as all times. `pinned`: the only node that may own it (warm-up).
    `order`: its place in the order of arrival. `stops`: ids that end it. `slot`: its row while it
    runs.
    """

    key: Key
    prompt: Sequence[int]
    params: SamplingParams
    arrived_s: float
    priority: int = 0
    deadline_s: float = NO_DEADLINE_S
    pinned: int | None = None
    order: int = -1
    stops: frozenset[int] = frozenset()
    stage: Stage = Stage.QUEUED
    owner: int = -1
    slot: int = -1
    generated: list[int] = field(default_factory=list)
    placed_s: float = 0.0
    first_token_s: float = 0.0
    token_s: float = 0.0
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)

    @property
    def ended(self) -> bool:
        return self.stage is Stage.ENDED

    @property
    def tokens_reserved(self) -> int:
        """KV slots for the input, the whole output, and one discarded lookahead row."""
        return len(self.prompt) + self.params.max_tokens
