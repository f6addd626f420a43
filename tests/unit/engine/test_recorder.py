from __future__ import annotations

import pytest

from tknp.engine.recorder import MOST_STEPS, Recorder
from tknp.errors import CapacityError, InvalidValue
from tknp.layout.program import Kind, Op

PROJECT, ATTEND = Op(Kind.PROJECT, 0, 4, 2), Op(Kind.ATTEND, 0, 2, 2)


def _step(recorder: Recorder, stream: int, step: int, *ops: Op) -> None:
    """What an engine does in a step."""
    recorder.enter(stream, step)
    for i, op in enumerate(ops):
        if recorder.on:
            recorder.add(stream, op, 100.0 + step + i, 0.25, 0.125)


def test_it_is_off_until_started_and_again_when_the_steps_have_passed() -> None:
    recorder = Recorder()
    _step(recorder, 0, 0, PROJECT)
    assert not recorder.on
    recording = recorder.start(2)
    for step in range(1, 5):
        _step(recorder, 0, step, PROJECT, ATTEND)
    assert recording.done.result(timeout=0) is recording
    assert not recorder.on
    assert [(op.step, op.kind) for op in recording.operations] == [
        (1, Kind.PROJECT), (1, Kind.ATTEND), (2, Kind.PROJECT), (2, Kind.ATTEND),
    ]  # fmt: skip
    first = recording.operations[0]
    assert (first.layer, first.seconds, first.waited_s) == (2, 0.25, 0.125)
    assert first.start_s == 101.0 - recording.origin_s


def test_a_step_under_way_is_not_recorded() -> None:
    recorder = Recorder()
    recorder.enter(0, 6)
    recording = recorder.start(1)
    recorder.add(0, PROJECT, 1.0, 1.0, 0.0)
    assert recording.operations == []


def test_the_first_stream_that_has_run_enough_ends_it_for_all() -> None:
    recorder = Recorder()
    recording = recorder.start(2)
    _step(recorder, 1, 70, ATTEND)
    _step(recorder, 0, 3, PROJECT)
    _step(recorder, 0, 4, PROJECT)
    assert not recording.done.done()
    _step(recorder, 0, 5, PROJECT)
    assert recording.done.done()
    _step(recorder, 1, 71, ATTEND)
    assert {(op.stream, op.step) for op in recording.operations} == {(1, 70), (0, 3), (0, 4)}


def test_stopped_early_it_keeps_what_it_has_and_can_start_again() -> None:
    recorder = Recorder()
    recording = recorder.start(5)
    _step(recorder, 0, 0, PROJECT)
    with pytest.raises(CapacityError, match="already"):
        recorder.start(1)
    recorder.stop(recording)
    recorder.stop(recording)
    assert len(recording.done.result(timeout=0).operations) == 1
    again = recorder.start(1)
    recorder.stop(recording)
    _step(recorder, 0, 1, PROJECT)
    assert len(again.operations) == 1


@pytest.mark.parametrize("steps", [0, MOST_STEPS + 1])
def test_steps_have_a_limit(steps: int) -> None:
    with pytest.raises(InvalidValue, match="steps"):
        Recorder().start(steps)
