"""A ring of bytes in shared memory: one process writes messages, another reads them.

    word 0             word 8             byte 128                          128 + capacity
    | head (writer's)  | tail (reader's)  | {header line, payload, padding} ... |

`head` and `tail` count bytes since the start and only grow; head - tail bytes are in flight. Every
message begins on a 64-byte line with its sequence number, size and dtype. A message larger than
the room left is moved piece by piece, as the reader makes room. The header is below 1% of messages
beyond 6,400 bytes, four rows of a small model.

This is the Python end; `kernels/csrc/mailbox.cpp` is the compiled one, and either may be at the
other side.

Memory order: the writer loads tail, stores payload, stores head; the reader loads head, loads
payload, stores tail. Only a store followed by a load of another word may change places on x86-64,
and none of these pairs is one; aligned 8-byte accesses are atomic there, and glibc's memmove fences
the non-temporal stores of its large copies. Other architectures would need fences, which Python
doesn't have: the transport refuses them.
"""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from tknp.errors import ProtocolError

LINE = 64
_HEAD, _TAIL, _DATA = 0, 8, 16  # in 8-byte words
PREFIX_BYTES = 8 * _DATA
# The place in this tuple is the code on the wire.
_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


def framing_bytes(nbytes: int) -> int:
    """What a message of `nbytes` takes of its ring besides them."""
    return LINE + -nbytes % LINE


def code_of(dtype: torch.dtype) -> int:
    """What stands for `dtype` in a header."""
    return _CODES.get(dtype, len(_DTYPES))


def mismatch(
    words: memoryview, position: int, capacity: int, expected: tuple[int, int, int]
) -> ProtocolError | None:
    """What is wrong with the header at `position`, for its (sequence number, bytes, dtype code)."""
    at = _DATA + position % capacity // 8
    found = words[at], words[at + 1], words[at + 2]
    if found == expected:
        return None
    (message, nbytes, code), (next_message, size, wanted) = found, expected
    return ProtocolError(
        f"message {message} has {nbytes} bytes of {_name(code)}, expected message "
        f"{next_message} with {size} bytes of {_name(wanted)}"
    )


def _name(code: int) -> str:
    return str(_DTYPES[code]) if code < len(_DTYPES) else "unknown dtype"


class Part:
    """One message on its way: a tensor to read from or to fill, and how far it got."""

    __slots__ = ("address", "code", "moved", "nbytes", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor  # keeps the memory at `address` alive
        self.address = tensor.data_ptr()
        self.nbytes = tensor.nbytes
        self.code = code_of(tensor.dtype)
        self.moved = -1  # -1: its header has not been moved either

    @property
    def done(self) -> bool:
        return self.moved == self.nbytes


class Ring:
    """`capacity` bytes (a multiple of 64) at `offset` of `memory`, which starts as zeros."""

    def __init__(self, memory: mmap.mmap, offset: int, capacity: int) -> None:
        self._words = memoryview(memory)[offset : offset + PREFIX_BYTES + capacity].cast("Q")
        self._memory = ctypes.c_char.from_buffer(memory, offset + PREFIX_BYTES)
        self._base = ctypes.addressof(self._memory)
        self._capacity = capacity
        self._position = 0  # the head of a writer, the tail of a reader
        self._messages = 0

    def push(self, part: Part) -> bool:
        """Write what there is room for; return whether all of `part` is written."""
        room = self._capacity - (self._position - self._words[_TAIL])
        if part.moved < 0:
            if not room:
                return False
            at = _DATA + self._position % self._capacity // 8
            self._words[at] = self._messages
            self._words[at + 1] = part.nbytes
            self._words[at + 2] = part.code
            self._messages += 1
            self._position += LINE
            room -= LINE
            part.moved = 0
        size = min(room, part.nbytes - part.moved)
        if size:
            self._move(part, size, into_ring=True)
        self._words[_HEAD] = self._position
        return part.done

    def pull(self, part: Part) -> bool:
        """Read what has arrived of the next message; return whether all of `part` is read.

        Raises:
            ProtocolError: the message is not the next one, or not of the part's size and dtype.
        """
        ready = self._words[_HEAD] - self._position
        if not ready:
            return False
        if part.moved < 0:
            self._check_header(part)
            self._position += LINE
            ready -= LINE
            part.moved = 0
        size = min(ready, part.nbytes - part.moved)
        if size:
            self._move(part, size, into_ring=False)
        self._words[_TAIL] = self._position
        return part.done

    def _check_header(self, part: Part) -> None:
        expected = self._messages, part.nbytes, part.code
        error = mismatch(self._words, self._position, self._capacity, expected)
        if error is not None:
            raise error
        self._messages += 1

    def _move(self, part: Part, size: int, *, into_ring: bool) -> None:
        """Copy `size` bytes between the part and the ring at its position, around the end."""
        while size:
            at = self._position % self._capacity
            run = min(size, self._capacity - at)
            if into_ring:
                ctypes.memmove(self._base + at, part.address + part.moved, run)
            else:
                ctypes.memmove(part.address + part.moved, self._base + at, run)
            part.moved += run
            size -= run
            self._position += -(-run // LINE) * LINE
