"""Runs the scheduler again on what a recording says that it was told; see `recording`.

A bug report carries a recording; `replay` shows whether this version decides as that one did, and
where not. The same calls in the same order leave nothing else to decide on: the scheduler has no
clock, no random numbers and no threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tknp.coordinator.division import Division
from tknp.coordinator.growth import Growth
from tknp.coordinator.limits import Limits
from tknp.coordinator.recording import FORMAT, changes, ends, grown, placements
from tknp.coordinator.request import NO_DEADLINE_S, Pin, Request
from tknp.coordinator.scheduler import Scheduler
from tknp.errors import CapacityError, InvalidValue, TknpError
from tknp.kv.holding import Key
from tknp.sampling.params import SamplingParams

_STOP, _GO = 1, 0


class Diverged(TknpError):
    """A replayed scheduler decided otherwise than the recorded one."""


def replay(path: Path) -> int:
    """Number of calls replayed from the recording at `path`, all with the recorded results.

    Raises InvalidValue if it can't be read or isn't a recording of this format, Diverged naming
    line, call and both results at the first difference. A last line cut short by a crash is left
    out.
    """
    lines = _lines(path)
    number, header = next(lines, (0, {}))
    if header.get("format") != FORMAT:
        raise InvalidValue("recording", str(path), f"not a recording of format {FORMAT}")
    again = _Replay(Scheduler(_limits(header["limits"]), header["epoch"]))
    for number, line in lines:
        call, gave = line["call"], line["gave"]
        try:
            found = again.call(call, line["given"])
        except (TknpError, KeyError, ValueError) as error:
            raise Diverged(f"line {number}: {call} gave {gave}, now {error!r}") from error
        if found != gave:
            raise Diverged(f"line {number}: {call} gave {gave}, now {found}")
    return number - 1


class _Replay:
    """Calls by the names and arguments of a recording; results in its form."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: dict[int, Request] = {}
        self._growths: list[Growth] = []

    def call(self, name: str, given: list[Any]) -> object:
        scheduler = self._scheduler
        match name:
            case "submit":
                return self._submit(*given)
            case "place":
                return placements(scheduler.place())
            case "unplace":
                scheduler.unplace(self._requests[given[0]])
            case "first_token":
                return scheduler.first_token(self._requests[given[0]], _token(given[1]))
            case "delta":
                delta = scheduler.delta(given[0])
                return None if delta is None else changes(delta)
            case "tokens":
                step, slots, stops, stream = given
                ids = [None if stop is None else _token(stop) for stop in stops]
                return ends(scheduler.tokens(step, slots, ids, stream))
            case "finished":
                scheduler.finished(*given)
            case "growths":
                found = scheduler.growths()
                self._growths += found
                return [scheduler.preemptions, grown(found)]
            case "grew":
                return scheduler.grew(self._growths[given[0]], given[1])
            case "shrunk":
                scheduler.shrunk(self._growths[given[0]])
            case "freed":
                scheduler.freed(self._requests[given[0]])
            case "withhold":
                scheduler.withhold(*given)
            case "end":
                return scheduler.end(self._requests[given[0]])
            case "overdue":
                return [request.order for request in scheduler.overdue(given[0])]
            case _:
                raise ValueError(f"unknown call {name!r}")
        return None

    def _submit(
        self,
        prompt_tokens: int,
        max_tokens: int,
        priority: int,
        deadline_s: float | None,
        pinned: list[int] | None,
        penalties: bool,
        generated: int,
    ) -> bool:
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, stop_token_ids=(_STOP,),
            presence_penalty=float(penalties),
        )  # fmt: skip
        request = Request(
            Key("", 0), range(prompt_tokens), params, 0.0, priority,
            NO_DEADLINE_S if deadline_s is None else deadline_s, Pin(*pinned) if pinned else None,
            generated=[_GO] * generated,
        )  # fmt: skip
        try:
            self._scheduler.submit(request)
        except CapacityError:
            return False
        self._requests[request.order] = request
        return True


def _limits(values: Mapping[str, Any]) -> Limits:
    division = values["division"]
    streams = tuple(tuple(owners) for owners in division["streams"])
    return Limits(
        **{**values, "pages": tuple(values["pages"]), "eos_ids": frozenset(values["eos_ids"]),
           "division": Division(**{**division, "streams": streams})}
    )  # fmt: skip


def _token(stops: bool) -> int:
    return _STOP if stops else _GO


def _lines(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue("recording", str(path), f"can't be read: {error}") from error
    whole = text.splitlines() if text.endswith("\n") else text.splitlines()[:-1]
    for number, line in enumerate(whole, start=1):
        try:
            values = json.loads(line)
        except ValueError as error:
            raise InvalidValue("recording", f"line {number}", f"is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise InvalidValue("recording", f"line {number}", "expected an object")
        yield number, values
