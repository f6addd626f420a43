from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from tknp.errors import CapacityError, DeadlineExceeded, InvalidValue, ProtocolError
from tknp.layout.rank import Rank
from tknp.transport import shared_memory
from tknp.transport.segment import DIRECTORY, PREFIX, Segment, sweep


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{secrets.token_hex(6)}"
    yield name
    for path in DIRECTORY.glob(f"{PREFIX}{name}*"):
        path.unlink()


def exists(name: str) -> bool:
    return (DIRECTORY / (PREFIX + name)).exists()


def crash(segment: Segment) -> None:
    """Leave what the kernel leaves of a process that ended: the name, unlocked."""
    segment.close()


def test_a_peer_sees_memory_and_flags_of_the_creator(name: str) -> None:
    made = Segment.create(name, 64)
    peer = Segment.attach(name, 64)
    assert peer is not None
    made.memory[-1] = 7
    assert peer.memory[-1] == 7
    assert not peer.attached
    made.set_attached()
    assert peer.attached
    assert peer.why_lost() is None
    made.set_lost("node is draining")
    assert peer.why_lost() == "node is draining"


def test_the_end_of_the_creator_shows_after_its_name_is_gone(name: str) -> None:
    made = Segment.create(name, 64)
    peer = Segment.attach(name, 64)
    assert peer is not None
    made.unlink()
    assert not exists(name)
    assert peer.why_lost() is None
    crash(made)
    assert peer.why_lost() == "its process ended"


def test_a_stale_segment_is_neither_attached_nor_kept(name: str) -> None:
    crash(Segment.create(name, 64))
    assert Segment.attach(name, 64) is None
    again = Segment.create(name, 64)
    assert Segment.attach(name, 64) is not None
    with pytest.raises(InvalidValue, match="new epoch"):
        Segment.create(name, 64)
    again.close()


def test_sweeping_removes_dead_names_only(name: str) -> None:
    crash(Segment.create(name + "-dead", 64))
    alive = Segment.create(name + "-alive", 64)
    sweep()
    assert not exists(name + "-dead")
    assert exists(name + "-alive")
    alive.close()


def test_ranks_of_different_pools_do_not_meet(name: str) -> None:
    made = Segment.create(name, 64)
    with pytest.raises(ProtocolError, match="ring_bytes"):
        Segment.attach(name, 128)
    made.close()


def test_no_room_is_said_and_nothing_is_left(name: str) -> None:
    with pytest.raises(CapacityError, match="enlarge /dev/shm"):
        Segment.create(name, 1 << 55)
    assert not exists(name)
    assert not list(DIRECTORY.glob(f".{PREFIX}*"))


def test_who_does_not_come_is_named(name: str) -> None:
    with pytest.raises(DeadlineExceeded, match=r"no sign of ranks \(1, 0\)"):
        shared_memory.connect(
            Rank(0, 0), 2, 1, pool=name, epoch=1, timeout_s=1, rendezvous_timeout_s=0.02
        )
    assert not exists(f"{name}-1-0")


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"pool": "a/b"}, "pool"), ({"ring_bytes": 100}, "ring_bytes"), ({"streams": 0}, "streams")],
)
def test_what_no_pool_can_have_is_refused(
    name: str, changed: dict[str, object], field: str
) -> None:
    arguments: dict[str, object] = {"pool": name, "epoch": 1, "timeout_s": 1.0, **changed}
    with pytest.raises(InvalidValue, match=field):
        shared_memory.connect(Rank(0, 0), 1, 1, **arguments)  # type: ignore[arg-type]
