"""HTTP/2 frames as bytes (RFC 9113, sections 4 and 6)."""

from __future__ import annotations

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">HBBBI")  # length: high 16 bits, low 8; kind; flags; stream
HEAD_BYTES = 9
LARGEST_WINDOW = 2**31 - 1
USUAL_WINDOW = 65_535
USUAL_FRAME_BYTES = 16_384
ACK = END_STREAM = 0x1
END_HEADERS, PADDED, PRIORITY = 0x4, 0x8, 0x20
_PAIR, _NUMBER = struct.Struct(">HI"), struct.Struct(">I")


class Kind(IntEnum):
    DATA = 0
    HEADERS = 1
    PRIORITY = 2
    RST_STREAM = 3
    SETTINGS = 4
    PUSH_PROMISE = 5
    PING = 6
    GOAWAY = 7
    WINDOW_UPDATE = 8
    CONTINUATION = 9


class Setting(IntEnum):
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5


class Code(IntEnum):
    """Why a stream or a connection ends."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ProtocolError(Exception):
    """The other side broke the protocol: the connection can't go on."""


def code_name(code: int) -> str:
    try:
        return Code(code).name
    except ValueError:
        return f"code {code}"


def frame(kind: Kind, flags: int, stream: int, body: bytes = b"") -> bytes:
    length = len(body)
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream) + body


def settings(values: dict[Setting, int]) -> bytes:
    return frame(Kind.SETTINGS, 0, 0, b"".join(_PAIR.pack(*pair) for pair in values.items()))


def read_settings(body: bytes) -> list[tuple[int, int]]:
    if len(body) % _PAIR.size:
        raise ProtocolError("SETTINGS of a broken length")
    return list(_PAIR.iter_unpack(body))


def number(kind: Kind, stream: int, value: int) -> bytes:
    """A frame whose body is one number: WINDOW_UPDATE or RST_STREAM."""
    return frame(kind, 0, stream, _NUMBER.pack(value))


def read_number(body: bytes) -> int:
    if len(body) < _NUMBER.size:
        raise ProtocolError("a frame is too short")
    return int(_NUMBER.unpack_from(body)[0])


def unpad(body: bytes, flags: int, kind: Kind) -> bytes:
    """The content of DATA or HEADERS without padding and priority."""
    start, padding = 0, 0
    if flags & PADDED:
        if not body:
            raise ProtocolError("padding without its length")
        start, padding = 1, body[0]
    if kind == Kind.HEADERS and flags & PRIORITY:
        start += 5
    if start + padding > len(body):
        raise ProtocolError("more padding than content")
    return body[start : len(body) - padding]
