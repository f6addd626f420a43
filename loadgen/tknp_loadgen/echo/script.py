"""What the echo server does with a request: a list of pauses and tokens, and how it ends.

Time is passed in. With real time the server sleeps; a test can give it a clock of its own and so
know to the nanosecond when each chunk left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Step:
    """Wait, then send `tokens` at once; 0 is an event without text, as some servers send."""

    pause_s: float
    tokens: int = 1


@dataclass(frozen=True)
class Script:
    """`headers_pause_s` comes before the response begins.

    `refusal`: no stream at all, but this HTTP status or gRPC code with this reason. `error`: the
    stream breaks with this reason after its steps; `cut`: it just ends. `told_tokens`: the count
    the server claims at the end, if not the true one. `end_pause_s`: between the last token and the
    end of the stream.
    """

    steps: tuple[Step, ...] = ()
    headers_pause_s: float = 0.0
    refusal: tuple[int, str] | None = None
    error: str | None = None
    cut: bool = False
    told_tokens: int | None = None
    finish: str = "length"
    end_pause_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(step.tokens for step in self.steps)


@dataclass(frozen=True)
class Received:
    """A request as the server sees it. `number` counts from 0 in order of arrival."""

    number: int
    max_tokens: int
    prompt_tokens: int
    chunk_usage: bool = True


Plan = Callable[[Received], Script]


class Time(Protocol):
    """How the server waits."""

    async def pause(self, seconds: float) -> None: ...

    async def written(self) -> None:
        """Something has just been handed to the socket."""


class RealTime:
    async def pause(self, seconds: float) -> None:
        if seconds > 0:
            await asyncio.sleep(seconds)

    async def written(self) -> None: ...


def steady(ttft_s: float = 0.0, itl_s: float = 0.0, tokens_a_chunk: int = 1) -> Plan:
    """Every request: the first chunk after `ttft_s`, others `itl_s` apart a token."""

    def plan(received: Received) -> Script:
        sizes = [tokens_a_chunk] * (received.max_tokens // tokens_a_chunk)
        if rest := received.max_tokens % tokens_a_chunk:
            sizes.append(rest)
        return Script(
            tuple(Step(ttft_s if i == 0 else itl_s * size, size) for i, size in enumerate(sizes))
        )

    return plan
