"""Requests encoded before they are due.

Encoding 32,898 token ids takes milliseconds: done at release, it would smear a burst of 128 over a
third of a second. Payloads are made in order of release, ahead of time, as far as memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence

from tknp_loadgen.exact import Integers
from tknp_loadgen.target.base import Clock, Target
from tknp_loadgen.trace.prompts import Prompts

BUDGET_BYTES = 128 * 2**20


class Payloads:
    """Encoded requests of `rows`, which are taken in that order."""

    def __init__(
        self, rows: Sequence[int], outputs: Integers, prompts: Prompts, target: Target,
        clock: Clock, budget_bytes: int = BUDGET_BYTES,
    ) -> None:  # fmt: skip
        """`outputs`: output tokens of every row of the trace."""
        self._rows = rows
        self._outputs = outputs
        self._prompts = prompts
        self._target = target
        self._clock = clock
        self._budget = budget_bytes
        self._next = 0
        self._ready: dict[int, tuple[bytes, str | None]] = {}
        self._held = 0
        self.cost_ns = 0  # of the slowest encoding so far
        self.late = 0  # encodings that a release had to wait for

    @property
    def wants_more(self) -> bool:
        return self._next < len(self._rows) and self._held < self._budget

    def encode_next(self) -> None:
        began = self._clock()
        row = self._rows[self._next]
        self._next += 1
        prompt = self._prompts.make(row)
        payload = self._target.encode(prompt, int(self._outputs[row]))
        self._ready[row] = payload, prompt.answer
        self._held += len(payload)
        self.cost_ns = max(self.cost_ns, self._clock() - began)

    def take(self, row: int) -> tuple[bytes, str | None]:
        """The payload and the right answer, if there is one."""
        while row not in self._ready:
            self.late += 1
            self.encode_next()
        payload, answer = self._ready.pop(row)
        self._held -= len(payload)
        return payload, answer
