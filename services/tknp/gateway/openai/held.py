"""A streamed answer that holds places: the request's at its pool, those of its limits.

    events -> client, as fast as it reads -> places given back: at the end, an error, a disconnect,
                                             or `UNREAD_S` after the deadline

The pool ends a request at its deadline, but a client that stops reading would keep the last event,
and with it the places, for ever. Its connection is closed instead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from fastapi.responses import StreamingResponse

from tknp.gateway.generation import UNREAD_S

log = logging.getLogger(__name__)


class HeldStream(StreamingResponse):
    """Server-sent events; gives back what `held` holds however the stream ends.

    `deadline_s`: of the request, on the clock of `time.monotonic`.
    """

    def __init__(
        self, content: AsyncIterator[bytes], held: AsyncExitStack, deadline_s: float
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(content, media_type="text/event-stream", headers=headers)
        self._held = held
        self._deadline_s = deadline_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._held:
            try:
                async with asyncio.timeout(self._deadline_s + UNREAD_S - time.monotonic()):
                    await super().__call__(scope, receive, send)
            except TimeoutError:  # the server closes a connection whose answer is not whole
                log.warning("a client that does not read its answer is left")
