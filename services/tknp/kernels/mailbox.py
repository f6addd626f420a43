"""Messages between ranks of one host, moved by compiled code: the lane of shared memory.

A post or a look costs one call. Short ones keep the interpreter: giving it up costs more than the
copy does where another thread wants it. Waits and large copies let it go.

    parts     | end, address, bytes, dtype code, bytes moved | ...   from message `_base` on
    _tensors  what keeps those addresses alive

Structures mirror csrc/mailbox.h field by field.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import struct
from collections.abc import Sequence
from ctypes import c_char, c_int64, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch  # noqa: F401 loads the OpenMP runtime that the library expects
from torch import Tensor

from tknp.errors import ProtocolError, TknpError
from tknp.kernels.build import prepare
from tknp.kernels.library import Part
from tknp.layout.rank import Rank
from tknp.transport.base import Message
from tknp.transport.lane import LaneFactory, PythonLane, Wire
from tknp.transport.ring import PREFIX_BYTES, code_of, mismatch
from tknp.transport.segment import LOST_OFFSET

log = logging.getLogger(__name__)
_PART = struct.Struct("@PPqqq")
_SLOTS = 64
_KEEP_BYTES = 128 * 1024  # moved in the time that giving up the interpreter can take


class _End(ctypes.Structure):
    _fields_ = (
        ("words", c_void_p),
        ("lost", c_void_p),
        ("capacity", c_uint64),
        ("position", c_uint64),
        ("seen", c_uint64),
        ("messages", c_uint64),
        ("sends", c_int64),
        ("blocked", c_uint64),
    )


class _Lane(ctypes.Structure):
    _fields_ = (("lost", c_void_p), ("turn", c_uint64))


class _Library:
    def __init__(self, path: str) -> None:
        count = (c_void_p, c_void_p, c_int64)
        message = (c_void_p, c_void_p, c_int64, c_int64)
        releasing, keeping = ctypes.CDLL(path), ctypes.PyDLL(path)
        self.push = _function(releasing.tknp_mailbox_push, *message)
        self.push_keeping = _function(keeping.tknp_mailbox_push, *message)
        self.wait = _function(releasing.tknp_mailbox_wait, *count, *4 * (c_int64,))
        self.progress = _function(releasing.tknp_mailbox_progress, *count)
        self.progress_keeping = _function(keeping.tknp_mailbox_progress, *count)


def _function(function: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = c_int64, arguments
    return function


@cache
def _load() -> _Library:
    return _Library(str(prepare()))


class NativeLane:
    """Implements `tknp.transport.lane.Lane`. Unavailable where this machine can't compile it."""

    def __init__(self, wires: Sequence[Wire], own_memory: mmap.mmap) -> None:
        library = _load()
        self._wait, self._progress = library.wait, library.progress
        self._push, self._push_keeping = library.push, library.push_keeping
        self._progress_keeping = library.progress_keeping
        self._memory = [own_memory, *(w.memory for w in wires), *(w.peer_memory for w in wires)]
        self._lane = _Lane(_address(own_memory, LOST_OFFSET), 0)
        self._at = ctypes.addressof(self._lane)
        self._ends = [
            _End(
                _address(w.memory, w.offset),
                _address(w.peer_memory, LOST_OFFSET),
                w.capacity,
                sends=w.sends,
            )
            for w in wires
        ]
        self._wires = {
            ctypes.addressof(end): (wire, end) for wire, end in zip(wires, self._ends, strict=True)
        }
        self._outgoing = {w.peer: end for end, (w, _) in self._wires.items() if w.sends}
        self._incoming = {w.peer: end for end, (w, _) in self._wires.items() if not w.sends}
        self._tensors: list[Tensor] = []
        self._nbytes = 0
        self._base = 0
        self._resize(_SLOTS)

    def post(self, sends: Sequence[Message], recvs: Sequence[Message]) -> tuple[int, int]:
        if len(self._tensors) + len(sends) + len(recvs) > self._slots:
            self._make_room(len(sends) + len(recvs))
        first = self._base + len(self._tensors)
        waiting = first > self._base  # perhaps on a wire of these, whose order is kept
        for peer, tensor in sends:
            end, nbytes = self._outgoing[peer], tensor.nbytes
            address, code = tensor.data_ptr(), code_of(tensor.dtype)
            moved = -1
            if not waiting:
                push = self._push_keeping if nbytes <= _KEEP_BYTES else self._push
                moved = push(end, address, nbytes, code)
                if moved == nbytes:
                    continue
                waiting = True
            self._add(end, address, nbytes, code, moved, tensor)
        if first > self._base:
            self._settle(self._move())
        for peer, tensor in recvs:
            end, code = self._incoming[peer], code_of(tensor.dtype)
            self._add(end, tensor.data_ptr(), tensor.nbytes, code, -1, tensor)
        return first, self._base + len(self._tensors)

    @property
    def address(self) -> int:
        """Of the lane, for compiled code that moves messages itself while none has a number."""
        return self._at

    def end(self, peer: Rank, *, sends: bool) -> int:
        """Address of one end of the wire to or from `peer`, for that code, too."""
        return (self._outgoing if sends else self._incoming)[peer]

    def take_over(self, messages: Sequence[tuple[Part, Tensor]]) -> tuple[int, int]:
        """Take what that code has begun, and not finished, with the memory that it is in."""
        if len(self._tensors) + len(messages) > self._slots:
            self._make_room(len(messages))
        first = self._base + len(self._tensors)
        for part, tensor in messages:
            self._add(part.end, part.address, part.size, part.code, part.moved, tensor)
        return first, self._base + len(self._tensors)

    def done(self, first: int, stop: int) -> bool:
        if stop <= self._base:
            return True
        return self._checked(self._move()) == 0 or not self.missing(first, stop)

    def wait(self, first: int, stop: int, since_ns: int, until_ns: int) -> bool:
        if stop <= self._base:
            return True
        base, count = self._base, len(self._tensors)
        left = self._wait(
            self._at, self._parts_at, count, max(first - base, 0), stop - base, since_ns, until_ns
        )
        return self._checked(left) == 0 or not self.missing(first, stop)

    def missing(self, first: int, stop: int) -> list[tuple[Rank, bool]]:
        found = []
        for number in range(max(first, self._base), stop):
            end, _, nbytes, _, moved = self._part(number - self._base)
            if moved != nbytes:
                wire, _ = self._wires[end]
                found.append((wire.peer, wire.sends))
        return found

    def _add(
        self, end: int, address: int, nbytes: int, code: int, moved: int, tensor: Tensor
    ) -> None:
        at = len(self._tensors) * _PART.size
        _PART.pack_into(self._parts, at, end, address, nbytes, code, moved)
        self._tensors.append(tensor)
        self._nbytes += nbytes

    def _part(self, slot: int) -> tuple[int, int, int, int, int]:
        return _PART.unpack_from(self._parts, slot * _PART.size)

    def _move(self) -> int:
        short = self._nbytes <= _KEEP_BYTES
        move = self._progress_keeping if short else self._progress
        left: int = move(self._at, self._parts_at, len(self._tensors))
        return left

    def _settle(self, left: int) -> int:
        """Forget all messages once none is left."""
        if left == 0:
            self._base += len(self._tensors)
            self._tensors.clear()
            self._nbytes = 0
        return left

    def _checked(self, left: int) -> int:
        if left < 0:
            raise self._mismatch(-1 - left)
        return self._settle(left)

    def _mismatch(self, slot: int) -> ProtocolError:
        at, _, nbytes, code, _ = self._part(slot)
        wire, end = self._wires[at]
        stop = wire.offset + PREFIX_BYTES + wire.capacity
        words = memoryview(wire.memory)[wire.offset : stop].cast("Q")
        expected = end.messages, nbytes, code
        error = mismatch(words, end.position, wire.capacity, expected)
        return error or ProtocolError("a header changed while it was read")

    def _make_room(self, count: int) -> None:
        """Drop what is done from the front, and grow if that is not enough."""
        done = 0
        for slot in range(len(self._tensors)):
            _, _, nbytes, _, moved = self._part(slot)
            if moved != nbytes:
                break
            done += 1
        kept = self._parts[done * _PART.size : len(self._tensors) * _PART.size]
        del self._tensors[:done]
        self._base += done
        self._nbytes = sum(tensor.nbytes for tensor in self._tensors)
        self._resize(max(self._slots, 2 * (len(self._tensors) + count)))
        self._parts[: len(kept)] = kept

    def _resize(self, slots: int) -> None:
        self._slots = slots
        self._parts = bytearray(slots * _PART.size)
        self._parts_at = _address(self._parts, 0)


def choose_lanes() -> LaneFactory:
    """Compiled lanes, or Python's where this machine can't have them; says which in the log."""
    try:
        _load()
    except TknpError as error:
        log.warning("exchanges in shared memory run in Python, which is slow: %s", error)
        return PythonLane
    log.info("exchanges in shared memory are compiled")
    return NativeLane


def _address(memory: mmap.mmap | bytearray, offset: int) -> int:
    return ctypes.addressof(c_char.from_buffer(memory, offset))
