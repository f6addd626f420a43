"""What one request does about the pools that it loses, from the time it has been let in.

    pool A | lost -> a pause, if A brought nothing -> wait for A or another of the model -> pool B
           | lost once too often                   -> the error that lost it

A pool that breaks may go on saying that it is ready for a while. Whoever asks it again at once is
refused at once, so the pause after a try that brought nothing doubles each time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from tknp.client import RequestFailed
from tknp.errors import ProtocolError, TknpError, Unavailable
from tknp.gateway.pools import Pools, Upstream

_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


def is_lost(error: TknpError) -> bool:
    """Whether `error` says that a pool is gone, rather than what became of the request."""
    if isinstance(error, RequestFailed):
        return error.code in ("UNAVAILABLE", "CANCELLED")
    return isinstance(error, Unavailable | ProtocolError)


class Losses:
    """Of one request for `model`. `most`: pools that it may lose and go on; `wait_s`: for the next
    one, each time; `deadline_s`: for all of it, on the clock of `time.monotonic`.
    """

    def __init__(
        self, pools: Pools, model: str, most: int, wait_s: float, deadline_s: float = float("inf"),
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self._pools, self._model = pools, model
        self._most, self._wait_s, self._deadline_s = most, wait_s, deadline_s
        self._pause = pause
        self._count = self._fruitless = 0

    async def first(self) -> Upstream:
        """The pool to begin with; waits if it has gone since the request was let in."""
        if not self._most:
            return self._pools.pick(self._model)
        return await self._pools.wait(self._model, self._wait_s, self._deadline_s)

    async def next(self, lost: Upstream, error: TknpError, *, brought: bool) -> Upstream:
        """Where to go on after `error` at `lost`; raises `error` where that is for the client.

        `brought`: tokens came from there.
        """
        if not is_lost(error):
            raise error
        lost.lost(str(error))
        self._count += 1
        if self._count > self._most:
            raise error
        if not brought:
            left_s = self._deadline_s - time.monotonic()
            doubled_s = min(_PAUSE_S * 2**self._fruitless, _LONGEST_PAUSE_S)
            self._fruitless += 1
            await self._pause(max(0.0, min(doubled_s, left_s)))
        return await self.first()
