from __future__ import annotations

from typing import Any

from tknp.coordinator.silence import ASKS, SILENT_S, Silence
from tknp.coordinator.startup import Peer
from tknp.v1.common_pb2 import Phase
from tknp.v1.prefill_pb2 import PrefillDescription


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def peer(lost: str = "", answered: bool = True) -> Peer:
    channel: Any = None
    said = PrefillDescription() if answered else None
    return Peer("prefill 0, rank 0", "127.0.0.1:1", channel, prefill=said, lost=lost)


def test_a_peer_is_silent_after_several_asks_and_some_time() -> None:
    clock, lost = Clock(), peer("Deadline Exceeded")
    silence = Silence(clock)
    for ask in range(ASKS + 5):
        clock.now_s = ask * SILENT_S / ASKS
        expected = [lost] if ask + 1 >= ASKS and clock.now_s >= SILENT_S else []
        assert silence.look([lost]) == expected
    assert lost.progress.phase == Phase.PHASE_FAILED
    assert lost.progress.error.startswith("has not answered for ")


def test_many_asks_in_a_moment_or_one_after_long_are_not_silence() -> None:
    clock, lost = Clock(), peer("Connection refused")
    silence = Silence(clock)
    assert [silence.look([lost]) for _ in range(3 * ASKS)] == [[]] * 3 * ASKS
    clock, silence = Clock(), Silence(lambda: clock.now_s)
    silence.look([lost])
    clock.now_s = 100
    assert silence.look([lost]) == []


def test_an_answer_ends_silence_and_who_never_answered_is_only_late() -> None:
    clock, lost, late = Clock(), peer("gone"), peer("gone", answered=False)
    silence = Silence(clock)
    for ask in range(ASKS):
        clock.now_s = ask * SILENT_S
        silence.look([lost])
        assert silence.look([late]) == []
    lost.lost = ""
    assert silence.look([lost]) == []
    lost.lost = "gone again"
    assert silence.look([lost]) == []
