"""What the runner asks of a server's API.

    encode    prompt -> bytes, before release; may take milliseconds
    begin     bytes -> socket, at once -> a Call; a Sink is told what comes back, and how it ends

Nothing is awaited between a deadline and the socket: `begin` is called by the timer and writes to
an open connection before it returns, and a Sink is told of tokens by the callback that read them.
A task for each request would cost a turn of the event loop both ways. A target stamps what it
receives before it looks inside: `at_ns` is taken first, parsing comes after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tknp_loadgen.trace.prompts import Prompt

Clock = Callable[[], int]  # nanoseconds of one monotonic clock


class Failure(Exception):
    """A request that did not end well. The message is never empty."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason or "no reason given")

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """`error` itself if it is one; else a defect of ours, by its type and words."""
        return error if isinstance(error, Failure) else cls(f"{type(error).__name__}: {error}")


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
    """Where a request's progress goes. Exactly one of `ended` and `failed` is told, once."""

    def released(self) -> None:
        """The request has just been handed to the transport."""

    def tokens(self, count: int, at_ns: int) -> None:
        """`count` tokens arrived together at `at_ns`; `count` is at least 1."""

    def text(self, piece: str) -> None:
        """What those tokens say."""

    def retried(self) -> None:
        """A connection that the server had closed was replaced; the request went out again."""

    def ended(self, ending: Ending) -> None:
        """The stream is complete."""

    def failed(self, reason: str) -> None:
        """It will not be. The reason is never empty."""


class Call(Protocol):
    """A request under way."""

    def cancel(self) -> None:
        """End it on the server too; the sink hears nothing more."""


class Target(Protocol):
    """One server."""

    @property
    def late_connections(self) -> int:
        """Connections that a request had to wait for."""

    async def open(self, connections: int) -> None:
        """Connect before anything is measured; raises TargetError where no server answers."""

    def encode(self, prompt: Prompt, output_tokens: int) -> bytes:
        """A request that makes the server answer with `output_tokens` tokens."""

    def begin(self, payload: bytes, sink: Sink) -> Call:
        """Send now. What goes wrong is told to the sink, maybe before this ends; never raised."""

    async def close(self) -> None: ...


class Unmeasured:
    """A Sink for warm-up: only its end matters. In a running event loop."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def released(self) -> None: ...
    def retried(self) -> None: ...
    def tokens(self, count: int, at_ns: int) -> None: ...
    def text(self, piece: str) -> None: ...

    def ended(self, ending: Ending) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def failed(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(Failure(reason))
