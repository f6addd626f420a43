"""Token ids in `bytes` fields: little-endian uint32, whatever the machine's byte order.

Apart from the other conversions because clients need it and nothing of the engine.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from tknp.errors import InvalidValue

MAX_TOKEN_ID = 2**32 - 1
_ID_BYTES = 4


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids -> bytes. Raises InvalidValue for an id that is no uint32."""
    try:
        packed = array("I", ids)
    except OverflowError:
        wrong = next(i for i in ids if not 0 <= i <= MAX_TOKEN_ID)
        raise InvalidValue("token_ids", wrong, f"must be in 0..{MAX_TOKEN_ID}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(field: str, data: bytes) -> list[int]:
    """Inverse of `pack_ids`. Raises InvalidValue naming `field` unless `data` is whole ids."""
    if len(data) % _ID_BYTES:
        raise InvalidValue(field, f"{len(data)} bytes", "pack ids as little-endian uint32")
    ids = array("I", data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
