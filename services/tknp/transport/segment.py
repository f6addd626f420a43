"""Memory that the ranks of one host share: a file each in /dev/shm, made by its reader.

Life: create -> lock -> publish under its name -> all peers have mapped it -> unlink the name. The
memory itself lives as long as somebody maps it.

The creator holds an exclusive lock for life, which the kernel drops when the process ends, however
it ends: a published segment that anyone can lock is a dead rank's. That needs no process ids, which
mean nothing across containers. A crash before the unlink leaves a name behind; the next rank to
connect on this host removes it.

    word 0        word 1       word 2          bytes 64 to 320
    | magic       | attached   | lost          | why lost, UTF-8 padded with zeros |
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import threading
from pathlib import Path

from tknp.errors import CapacityError, InvalidValue, ProtocolError

DIRECTORY = Path("/dev/shm")
PREFIX = "tknp-rings-"  # of this file alone: sweep removes what nobody holds
HEADER_BYTES = 320
_MAGIC = 0x31_50_4E_4B_54  # "TKNP1"
_MAGIC_WORD, _ATTACHED_WORD, _LOST_WORD = 0, 1, 2
LOST_OFFSET = 8 * _LOST_WORD
"""Where in the memory a word other than 0 shows that its creator takes no part any more."""
_REASON = slice(64, HEADER_BYTES)


class Segment:
    """One rank's segment, as its creator or a peer maps it."""

    def __init__(self, path: Path, descriptor: int, nbytes: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self.memory = mmap.mmap(descriptor, nbytes)
        self._words = memoryview(self.memory)[:64].cast("Q")
        self._lock = threading.Lock()  # a closed descriptor's number may be another file's

    @classmethod
    def create(cls, name: str, nbytes: int) -> Segment:
        """Publish zeroed memory of `nbytes` after the header, held by this process.

        Raises:
            CapacityError: /dev/shm has no room.
            InvalidValue: a living process has published the name.
        """
        path = DIRECTORY / (PREFIX + name)
        if path.exists() and not _unlink_if_stale(path):
            raise InvalidValue(
                "epoch", name, "a living process has this pool, epoch and rank: start a new epoch"
            )
        draft = DIRECTORY / f".{PREFIX}{secrets.token_hex(8)}"
        total = HEADER_BYTES + nbytes
        descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Pages that are not there at the first touch would end the process by a signal.
            os.posix_fallocate(descriptor, 0, total)
            segment = cls(path, descriptor, total)
            segment._words[_MAGIC_WORD] = _MAGIC
            os.rename(draft, path)
        except OSError as error:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise CapacityError(
                f"shared memory segment of {total} bytes: {error.strerror}; enlarge /dev/shm, or "
                "lower ring_bytes or streams"
            ) from error
        return segment

    @classmethod
    def attach(cls, name: str, nbytes: int) -> Segment | None:
        """Map the segment of a living peer; None while there is none.

        Raises:
            ProtocolError: the peer laid it out for another pool.
        """
        path = DIRECTORY / (PREFIX + name)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if _is_dead(descriptor):
            os.close(descriptor)
            return None
        total = HEADER_BYTES + nbytes
        found = os.fstat(descriptor).st_size
        if found != total:
            os.close(descriptor)
            raise ProtocolError(
                f"shared memory {name} has {found} bytes instead of {total}: ranks differ in "
                "nodes, tp, streams or ring_bytes"
            )
        segment = cls(path, descriptor, total)
        if segment._words[_MAGIC_WORD] != _MAGIC:
            raise ProtocolError(f"shared memory {name} was made by another version")
        return segment

    @property
    def attached(self) -> bool:
        """Whether the creator has mapped the segments of all its peers."""
        return bool(self._words[_ATTACHED_WORD])

    def set_attached(self) -> None:
        self._words[_ATTACHED_WORD] = 1

    def set_lost(self, reason: str) -> None:
        """Tell peers that the creator takes no part any more. The creator's call."""
        text = reason.encode()[: HEADER_BYTES - 64]
        self.memory[_REASON] = text.ljust(HEADER_BYTES - 64, b"\0")
        self._words[_LOST_WORD] = 1

    def why_lost(self) -> str | None:
        """Why the creator takes no part any more; None while it does."""
        if self._words[_LOST_WORD]:
            return self.memory[_REASON].rstrip(b"\0").decode(errors="replace")
        with self._lock:
            if self._descriptor < 0:
                return "closed"
            return "its process ended" if _is_dead(self._descriptor) else None

    def unlink(self) -> None:
        """Remove the name; mappings stay."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock and the file. The memory goes with the last reference to it."""
        with self._lock:
            if self._descriptor >= 0:
                # The mapping holds a duplicate of the descriptor, and the file lock with it.
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
                os.close(self._descriptor)
                self._descriptor = -1


def sweep() -> None:
    """Remove the names that ranks of this user have left behind by crashing."""
    for path in DIRECTORY.glob(PREFIX + "*"):
        _unlink_if_stale(path)


def _unlink_if_stale(path: Path) -> bool:
    """Remove `path` if its creator is dead; return whether the name is free now."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    try:
        stale = _is_dead(descriptor)
        if stale:
            path.unlink(missing_ok=True)
        return stale
    finally:
        os.close(descriptor)


def _is_dead(descriptor: int) -> bool:
    """Whether nobody holds the exclusive lock. Shared, so that any number may ask at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return True
