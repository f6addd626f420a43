"""How far a rank is on its way to serving, and why it can't go on.

LOADING -> JOINING -> WARMING -> READY
    \\         |          |        /
     +---------+> FAILED <+-------+       final: the first reason stays
"""

from __future__ import annotations

import asyncio
import logging

from tknp.v1.common_pb2 import Phase, Progress

log = logging.getLogger(__name__)


class Lifecycle:
    """Belongs to one event loop; `enter` and `loaded` may also be called on other threads."""

    def __init__(self) -> None:
        self.phase: Phase.ValueType = Phase.PHASE_LOADING
        self.loaded_bytes = 0
        self.total_bytes = 0
        self.error = ""
        self._failed = asyncio.Event()

    @property
    def progress(self) -> Progress:
        """What descriptions of this rank carry."""
        return Progress(
            phase=self.phase,
            loaded_bytes=self.loaded_bytes,
            total_bytes=self.total_bytes,
            error=self.error,
        )

    def enter(self, phase: Phase.ValueType) -> None:
        """Go on to `phase`; what has failed stays failed."""
        if not self.error:
            self.phase = phase

    def loaded(self, done_bytes: int, total_bytes: int) -> None:
        """Bytes of weights read so far, of all that this rank reads."""
        self.loaded_bytes, self.total_bytes = done_bytes, total_bytes

    def fail(self, reason: str) -> bool:
        """The rank can't go on. Called on the event loop. The first reason stays: True for it."""
        if self.error:
            return False
        log.error("%s", reason)
        self.error, self.phase = reason, Phase.PHASE_FAILED
        self._failed.set()
        return True

    async def failed(self) -> str:
        """Wait until the rank can't go on; return why."""
        await self._failed.wait()
        return self.error
