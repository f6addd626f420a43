"""What the runner asks of a server's API.

    encode    prompt -> bytes, before release; may take milliseconds
    send      bytes -> tokens told to a Sink as they arrive -> Ending, or Failure

A target stamps what it receives before it looks inside: `at_ns` is taken first, parsing comes
after. Cancelling `send` ends the request on the server.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tknp_loadgen.trace.prompts import Prompt

Clock = Callable[[], int]  # nanoseconds of one monotonic clock


class Failure(Exception):
    """A request that did not end well. The message is never empty."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason or "no reason given")


@dataclass(frozen=True)
class Ending:
    """What the server said at the end; None: it does not say.

    `completion_tokens` is the server's own count. `finish`: stop or length. Seconds are the
    server's own measurements.
    """

    finish: str | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    server_ttft_s: float | None = None
    owner: int | None = None


class Sink(Protocol):
    """Where a request's progress goes."""

    def released(self) -> None:
        """The request has just been handed to the transport."""

    def tokens(self, count: int, at_ns: int) -> None:
        """`count` tokens arrived together at `at_ns`; `count` is at least 1."""

    def text(self, piece: str) -> None:
        """What those tokens say."""

    def retried(self) -> None:
        """A connection that the server had closed was replaced; the request went out again."""


class Target(Protocol):
    """One server."""

    @property
    def late_connections(self) -> int:
        """Connections that a request had to wait for."""

    async def open(self, connections: int) -> None:
        """Connect before anything is measured; raises TargetError where no server answers."""

    def encode(self, prompt: Prompt, output_tokens: int) -> bytes:
        """A request that makes the server answer with `output_tokens` tokens."""

    async def send(self, payload: bytes, sink: Sink) -> Ending:
        """Send and receive until the stream has ended; raises Failure."""

    async def close(self) -> None: ...
