"""Header blocks of HTTP/2 as they come in: put together, decoded by hpack, remembered.

A server says the same few things at the beginning and end of every stream. Once they are in the
table, the same bytes mean the same headers until the table changes, so they are decoded once.
"""

from __future__ import annotations

from collections.abc import Mapping

import hpack

from tknp_loadgen.target import frames
from tknp_loadgen.target.frames import ProtocolError

MOST_BYTES = 1 << 20  # of one block; more is an attack or a defect
_MOST_KNOWN = 64


class Blocks:
    """Those of one connection, all of which share one table."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder()
        self._known: dict[bytes, Mapping[str, str]] = {}  # by today's table
        self._piece = b""
        self._begun: tuple[int, int] | None = None  # stream and flags of what is not complete

    @property
    def incomplete(self) -> bool:
        """Whether nothing but CONTINUATION may come now."""
        return self._begun is not None

    def add(self, flags: int, number: int, piece: bytes) -> tuple[Mapping[str, str], bool] | None:
        """The headers, and whether they end the stream; None while there is more to come.

        Raises ProtocolError.
        """
        if self._begun is not None:
            if self._begun[0] != number:
                raise ProtocolError("headers of another stream go on")
            flags |= self._begun[1]
        self._piece += piece
        if len(self._piece) > MOST_BYTES:
            raise ProtocolError("headers without end")
        if not flags & frames.END_HEADERS:
            self._begun = number, flags & frames.END_STREAM
            return None
        block, self._piece, self._begun = self._piece, b"", None
        return self._decode(block), bool(flags & frames.END_STREAM)

    def _decode(self, block: bytes) -> Mapping[str, str]:
        known = self._known.get(block)
        if known is not None:
            return known
        before = self._table()
        try:
            headers = {str(name): str(value) for name, value in self._decoder.decode(block)}
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise ProtocolError(f"headers: {error}") from error
        after = self._table()
        changed = before[:2] != after[:2] or before[2] is not after[2]
        if changed or len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        if not changed:
            self._known[block] = headers
        return headers

    def _table(self) -> tuple[int, int, object]:
        """What shows whether a block has changed the table.

        What is added becomes the newest entry, what is taken away makes it shorter, and a block may
        set how large it is allowed to be.
        """
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return table.maxsize, len(entries), entries[0] if entries else None
