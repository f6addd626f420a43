"""Writes down what the scheduler was told and what it decided, for `tknp.coordinator.replay`.

One JSON object a line: the limits first, then each call that changed something, in order, with the
clock (`at_s`), what was passed (`given`) and what came back (`gave`). Requests are named by their
order of arrival, prompts and outputs appear as counts only, and a token as whether it ends its
request: a log can be handed on without anybody's text in it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tknp.coordinator.growth import Growth
from tknp.coordinator.limits import Limits
from tknp.coordinator.request import NO_DEADLINE_S, Request, Stage
from tknp.coordinator.scheduler import Scheduler, Taken
from tknp.engine.batch import Delta
from tknp.errors import CapacityError, InvalidValue
from tknp.v1.common_pb2 import FinishReason

FORMAT = 2
FIELD = "record"


class RecordingScheduler(Scheduler):
    """A Scheduler that appends to the file `path` as it goes; flushed whenever a step finishes.

    Raises InvalidValue when `path` can't be written.
    """

    def __init__(
        self, limits: Limits, epoch: int, *, path: Path, clock: Callable[[], float]
    ) -> None:
        super().__init__(limits, epoch)
        self._clock = clock
        self._numbers: dict[Growth, int] = {}
        self._grown = 0
        try:
            self._file = path.open("w")
        except OSError as error:
            raise InvalidValue(FIELD, str(path), f"can't be written: {error.strerror}") from error
        values = {**asdict(limits), "eos_ids": sorted(limits.eos_ids)}
        self._line({"format": FORMAT, "limits": values, "epoch": epoch})

    def close(self) -> None:
        self._file.close()

    def submit(self, request: Request) -> None:
        try:
            super().submit(request)
        except CapacityError:
            self._write("submit", _asked(request), gave=False)
            raise
        self._write("submit", _asked(request), gave=True)

    def place(self) -> list[Request]:
        placed = super().place()
        if placed:
            self._write("place", [], placements(placed))
        return placed

    def unplace(self, request: Request) -> None:
        super().unplace(request)
        self._write("unplace", [request.order])

    def first_token(self, request: Request, token: int) -> FinishReason.ValueType | None:
        stops = token in request.stops
        finish = super().first_token(request, token)
        self._write("first_token", [request.order, stops], finish)
        return finish

    def delta(self, stream: int = 0) -> Delta | None:
        delta = super().delta(stream)
        if delta is not None:
            self._write("delta", [stream], changes(delta))
        return delta

    def tokens(
        self, step: int, slots: Sequence[int], ids: Sequence[int | None], stream: int = 0
    ) -> list[Taken]:
        rows = self.streams[stream].in_flight.get(step, {})
        stops = [
            None if token is None else slot in rows and token in rows[slot].stops
            for slot, token in zip(slots, ids, strict=True)
        ]
        taken = super().tokens(step, slots, ids, stream)
        self._write("tokens", [step, list(slots), stops, stream], ends(taken))
        return taken

    def finished(self, step: int, stream: int = 0) -> None:
        super().finished(step, stream)
        self._write("finished", [step, stream])
        self._file.flush()

    def growths(self) -> list[Growth]:
        wanted = self._growing.starving
        found = super().growths()
        if wanted:
            self._write("growths", [], [self.preemptions, grown(found)])
        for growth in found:
            self._numbers[growth] = self._grown
            self._grown += 1
        return found

    def grew(self, growth: Growth, given: Collection[int]) -> bool:
        runs = super().grew(growth, given)
        self._write("grew", [self._numbers[growth], sorted(given)], runs)
        if runs:
            self._numbers.pop(growth, None)
        return runs

    def shrunk(self, growth: Growth) -> None:
        super().shrunk(growth)
        self._write("shrunk", [self._numbers.pop(growth)])

    def freed(self, request: Request) -> None:
        super().freed(request)
        self._write("freed", [request.order])

    def withhold(self, node: int, pages: int) -> None:
        super().withhold(node, pages)
        self._write("withhold", [node, pages])

    def end(self, request: Request) -> Stage:
        stage = super().end(request)
        if stage is not Stage.ENDED:
            self._write("end", [request.order], stage)
        return stage

    def overdue(self, now_s: float) -> list[Request]:
        late = super().overdue(now_s)
        if late:
            self._write("overdue", [now_s], [request.order for request in late])
        return late

    def _write(self, call: str, given: object, gave: object = None) -> None:
        self._line({"call": call, "at_s": self._clock(), "given": given, "gave": gave})

    def _line(self, values: dict[str, Any]) -> None:
        json.dump(values, self._file, separators=(",", ":"))
        self._file.write("\n")


def placements(placed: Sequence[Request]) -> list[list[int]]:
    """[order, stream, slot, owners ...] of each."""
    return [[r.order, r.stream, r.slot, *r.owners] for r in placed]


def changes(delta: Delta) -> list[object]:
    """Step number, ends, [slot, attempt, position] of admissions, [slot, owners ...] of growths."""
    admits = [[a.slot, a.key.attempt, a.position] for a in delta.admits]
    grows = [[grow.slot, *grow.shares.owners] for grow in delta.grows]
    return [delta.step, list(delta.ends), admits, grows]


def grown(found: Sequence[Growth]) -> list[list[int]]:
    """[order, nodes ...] of each growth that nodes are asked for."""
    return [[growth.request.order, *growth.nodes] for growth in found]


def ends(taken: Sequence[Taken]) -> list[list[int | None]]:
    """[order, finish reason] of each row that counted."""
    return [[one.request.order, one.finish] for one in taken]


def _asked(request: Request) -> list[object]:
    deadline_s = None if request.deadline_s == NO_DEADLINE_S else request.deadline_s
    return [
        len(request.prompt), request.params.max_tokens, request.priority, deadline_s,
        request.pinned and list(request.pinned), request.params.needs_history,
        len(request.generated),
    ]  # fmt: skip
