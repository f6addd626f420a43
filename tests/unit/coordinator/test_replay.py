"""A recording replays to the same decisions, and a difference is found where it is."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tknp.coordinator.limits import Limits
from tknp.coordinator.recording import RecordingScheduler
from tknp.coordinator.replay import Diverged, replay
from tknp.coordinator.request import Request, Stage
from tknp.coordinator.scheduler import Scheduler
from tknp.errors import CapacityError, InvalidValue

MakeLimits = Callable[..., Limits]
MakeRequest = Callable[..., Request]
SECRET = 4242


def drive(scheduler: Scheduler, make_request: MakeRequest, seed: int) -> None:
    """A few hundred calls as a busy pool makes them, ends of every kind among them."""
    dice = random.Random(seed)
    launched: list[tuple[int, int]] = []
    for turn in range(300):
        if dice.random() < 0.4:
            request = make_request(
                dice.randint(1, 12), dice.randint(1, 20), ignore_eos=dice.random() < 0.5,
                priority=dice.randint(0, 2), deadline_s=turn + dice.choice([2.0, 1e9, 1e9]),
                stop_token_ids=(SECRET,),
            )  # fmt: skip
            if dice.random() < 0.1 and request.params.max_tokens > 1:
                request.generated, request.given = [SECRET], 1
            try:
                scheduler.submit(request)
            except CapacityError:
                continue
        scheduler.withhold(0, dice.randint(0, 1))
        for request in scheduler.place():
            if dice.random() < 0.2:
                scheduler.unplace(request)
            elif scheduler.first_token(request, dice.choice([7, 8, SECRET])) is not None:
                scheduler.freed(request)
        gone = scheduler.overdue(float(turn))
        if not gone and scheduler.live and dice.random() < 0.1:
            gone = [dice.choice(scheduler.live)]
        for request in gone:
            if scheduler.end(request) in (Stage.PLACED, Stage.READY):
                scheduler.freed(request)
        for stream in range(len(scheduler.streams)):
            while (delta := scheduler.delta(stream)) is not None:
                launched.append((stream, delta.step))
        if launched:
            stream, step = launched.pop(0)
            slots = list(scheduler.streams[stream].in_flight[step])
            ids = [dice.choice([0, 7, 7, 7, 7, 7, SECRET, None]) for _ in slots]
            scheduler.tokens(step, slots, ids, stream)
            scheduler.finished(step, stream)
        for growth in scheduler.growths():
            given = growth.nodes if dice.random() < 0.6 else ()
            if not scheduler.grew(growth, given):
                scheduler.shrunk(growth)


@pytest.fixture
def recording(
    tmp_path: Path, make_limits: MakeLimits, make_request: MakeRequest
) -> Callable[[int], Path]:
    def record(seed: int) -> Path:
        path = tmp_path / f"{seed}.jsonl"
        clock = count()
        limits = make_limits(
            max_batch=4, max_queue=6, streams=((0, 1), (0, 1)), width=2, reserve_ratio=0.0
        )
        scheduler = RecordingScheduler(limits, 3, path=path, clock=lambda: float(next(clock)))
        drive(scheduler, make_request, seed)
        scheduler.close()
        return path

    return record


@pytest.mark.parametrize("seed", range(5))
def test_the_same_decisions_again(seed: int, recording: Callable[[int], Path]) -> None:
    path = recording(seed)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    calls = {line["call"] for line in lines[1:]}
    assert calls >= {"submit", "place", "unplace", "first_token", "delta", "tokens", "finished",
                     "freed", "withhold", "end", "overdue", "growths", "grew",
                     "shrunk"}  # fmt: skip
    assert [line["at_s"] for line in lines[1:]] == [float(n) for n in range(len(lines) - 1)]
    assert replay(path) == len(lines) - 1


def test_no_ids_of_anybody_are_in_it(recording: Callable[[int], Path]) -> None:
    text = recording(0).read_text()
    assert str(SECRET) not in text
    assert "request-" not in text


@pytest.mark.parametrize(
    "call", ["place", "first_token", "delta", "tokens", "end", "overdue", "growths"]
)
def test_another_decision_is_found(call: str, recording: Callable[[int], Path]) -> None:
    path = recording(1)
    lines = path.read_text().splitlines()
    at = next(
        i for i, line in enumerate(lines)
        if f'"call":"{call}"' in line and json.loads(line)["gave"]
    )  # fmt: skip
    changed = {**json.loads(lines[at]), "gave": "something else"}
    path.write_text("\n".join([*lines[:at], json.dumps(changed), *lines[at + 1 :], ""]))
    with pytest.raises(Diverged, match=rf"line {at + 1}: {call} gave something else, now "):
        replay(path)


def test_a_call_that_is_missing_is_found(recording: Callable[[int], Path]) -> None:
    path = recording(2)
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"call":"place"' in line)
    path.write_text("\n".join([*lines[:at], *lines[at + 1 :], ""]))
    with pytest.raises(Diverged):
        replay(path)


def test_a_line_cut_short_by_a_crash_is_left_out(recording: Callable[[int], Path]) -> None:
    path = recording(3)
    text = path.read_text()
    calls = replay(path)
    path.write_text(text[:-4])
    assert replay(path) == calls - 1


@pytest.mark.parametrize("text", ["", "{}\n", '{"format": 99}\n'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(InvalidValue, match="not a recording of format 2"):
        replay(path)


@pytest.mark.parametrize("text", ["{not json}\n", "[]\n"])
def test_damaged_lines_are_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged"
    path.write_text(text)
    with pytest.raises(InvalidValue, match="line 1"):
        replay(path)


def test_files_that_cannot_be_read_or_written(tmp_path: Path, make_limits: MakeLimits) -> None:
    with pytest.raises(InvalidValue, match="can't be read"):
        replay(tmp_path / "absent")
    path = tmp_path / "no" / "such" / "directory"
    with pytest.raises(InvalidValue, match=r"record=.*can't be written"):
        RecordingScheduler(make_limits(), 1, path=path, clock=lambda: 0.0)
