"""Records what a rank does in its next steps, operation by operation, for `tknp trace`.

    event loop      start(steps) -> Future
    engine thread   enter(stream, step) ... add(op) ... enter(...) -> the future has its result

Off, it costs one look at `on` an operation. The recording ends as soon as one stream begins a step
after `steps` whole ones, so that what was recorded of the other streams is of the same time; or
when `stop` is called, with what there is. Times are the host's: on CUDA, where operations are only
enqueued, they tell when the host issued them.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field

from tknp.errors import CapacityError, InvalidValue
from tknp.layout.program import Kind, Op

MOST_STEPS = 256
_MOST_OPERATIONS = 500_000


@dataclass(frozen=True, slots=True)
class Recorded:
    """One operation. `start_s` counts from the recording's origin."""

    stream: int
    step: int
    kind: Kind
    layer: int
    start_s: float
    seconds: float
    waited_s: float


@dataclass
class Recording:
    """`origin_unix_s`: what `start_s` counts from, on the clock that hosts share."""

    steps: int
    origin_unix_s: float = field(default_factory=time.time)
    origin_s: float = field(default_factory=time.perf_counter)
    operations: list[Recorded] = field(default_factory=list)
    entered: Counter[int] = field(default_factory=Counter)
    done: Future[Recording] = field(default_factory=Future)


class Recorder:
    """Of one rank, all its streams. `on`: whether `add` is wanted."""

    def __init__(self) -> None:
        self.on = False
        self._recording: Recording | None = None
        self._ending = threading.Lock()
        self._steps: dict[int, int] = {}

    def start(self, steps: int) -> Recording:
        """Begin with the next step of each stream; `done` of the result tells when it is over.

        Raises CapacityError while another recording runs.
        """
        if not 1 <= steps <= MOST_STEPS:
            raise InvalidValue("steps", steps, f"record 1 to {MOST_STEPS} steps")
        if self._recording is not None:
            raise CapacityError("this rank is being recorded already; try again when that is over")
        self._steps.clear()
        self._recording = recording = Recording(steps)
        return recording

    def stop(self, recording: Recording) -> None:
        """End `recording` with what it has, unless it is over."""
        with self._ending:
            if self._recording is not recording:
                return
            self.on = False
            self._recording = None
        recording.done.set_result(recording)

    def enter(self, stream: int, step: int) -> None:
        """Step `step` of `stream` begins. Called by the engine thread alone, as `add` is."""
        recording = self._recording
        if recording is None:
            return
        full = len(recording.operations) >= _MOST_OPERATIONS
        if recording.entered[stream] == recording.steps or full:
            self.stop(recording)
            return
        recording.entered[stream] += 1
        self._steps[stream] = step
        self.on = True

    def add(self, stream: int, op: Op, began_s: float, seconds: float, waited_s: float) -> None:
        """`op`, begun at `began_s` of `time.perf_counter`, took `seconds`, of which it waited."""
        recording, step = self._recording, self._steps.get(stream)
        if recording is None or step is None:  # the step began before the recording did
            return
        start_s = began_s - recording.origin_s
        recording.operations.append(
            Recorded(stream, step, op.kind, op.layer, start_s, seconds, waited_s)
        )
