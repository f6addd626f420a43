"""A node's answers to its steps, from what its ranks say of them.

    engine thread --Outcome--> loop: outcome ---+
    another TP rank --StepResult--> answered ---+--> emit(result), once all ranks have finished

Every rank finishes the steps of a stream in their order, so that answers leave in that order too.
No task waits for a step: a rank's word is taken in the callback that brings it, as each further
turn of the event loop is processor time that the computing threads of this host lack.

A step that failed here is answered at once, one that failed elsewhere as soon as it has ended here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from tknp.engine.batch import Delta
from tknp.engine.decode import Outcome
from tknp.errors import ProtocolError
from tknp.kv.holding import Key
from tknp.layout.rank import Rank
from tknp.rpc.convert import token_to
from tknp.v1.step_pb2 import StepResult

IN_FLIGHT = 8


@dataclass(slots=True)
class _Step:
    """`waits`: ranks that have not finished it; `ended`: keys whose pages it lets go."""

    result: StepResult
    ended: list[Key]
    waits: int
    done_here: bool = False


class Answers:
    """Of one call. `emit(result)` sends an answer, `free(keys)` lets pages go that it ended.

    `siblings`: other TP ranks of the node. Belongs to the running event loop.
    """

    def __init__(
        self,
        rank: Rank,
        siblings: int,
        emit: Callable[[StepResult], None],
        free: Callable[[list[Key]], None],
    ) -> None:
        self._rank = rank
        self._ranks = 1 + siblings
        self._emit = emit
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._open: dict[tuple[int, int], _Step] = {}  # by stream and step, in order
        self._lost = ""

    def __len__(self) -> int:
        """Steps without an answer."""
        return len(self._open)

    def check_room(self, stream: int) -> None:
        """Raise ProtocolError if no further step of `stream` may be begun."""
        if sum(key[0] == stream for key in self._open) >= IN_FLIGHT:
            raise ProtocolError(f"more than {IN_FLIGHT} steps are in flight")

    def begin(self, delta: Delta, outcome: Future[Outcome], ended: list[Key]) -> None:
        """All ranks have been told of the step of `delta`; `outcome` is this rank's."""
        result = StepResult(epoch=delta.epoch, stream=delta.stream, step=delta.step)
        result.error = self._lost
        self._open[delta.stream, delta.step] = step = _Step(result, ended, self._ranks)

        def tell(outcome: Future[Outcome]) -> None:
            with suppress(RuntimeError):  # the loop has been closed: nobody waits for an answer
                self._loop.call_soon_threadsafe(self._outcome, step, outcome)

        outcome.add_done_callback(tell)

    def answered(self, result: StepResult) -> None:
        """Another TP rank has finished a step, or failed in it."""
        step = self._open.get((result.stream, result.step))
        if step is not None:
            step.result.error = step.result.error or result.error
            self._finished(step)

    def lost(self, reason: str) -> None:
        """Another TP rank finishes no steps any more."""
        self._lost = self._lost or reason
        for step in list(self._open.values()):
            step.result.error = step.result.error or reason
            self._check(step)

    def _outcome(self, step: _Step, outcome: Future[Outcome]) -> None:
        result = step.result
        try:
            _fill(result, outcome.result())
        except BaseException as error:
            result.error = f"rank {self._rank}, step {result.step}: {error}"
        step.done_here = True
        self._finished(step)

    def _finished(self, step: _Step) -> None:
        step.waits -= 1
        self._check(step)

    def _check(self, step: _Step) -> None:
        result = step.result
        if not step.done_here or (step.waits and not result.error):
            return
        if self._open.pop((result.stream, result.step), None) is None:
            return
        if not result.error:
            try:
                self._free(step.ended)
            except Exception as error:  # the coordinator has to hear of it: nobody else does
                result.error = f"rank {self._rank}, step {result.step}: {error}"
        self._emit(result)


def _fill(result: StepResult, outcome: Outcome) -> None:
    result.seconds = outcome.seconds
    result.slots.extend(outcome.slots)
    rows = zip(outcome.tokens, outcome.logprobs, strict=True)
    result.tokens.extend(
        token_to(token, logprobs, outcome.errors.get(row))
        for row, (token, logprobs) in enumerate(rows)
    )
