"""The owner rank's side: where arriving KV is written.

    NIXL   the prefill rank writes into the registered pool by itself; nothing runs here
    gRPC   AttentionOwner.Write -> `write` -> Receiver.apply(chunk) -> slots of the pool

`apply` runs on the event loop, where windows are opened and closed too: a chunk is written whole
while its window is open, or not at all. A chunk of ours is at most 512 KiB, so it holds the loop
for less than a millisecond.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import torch
from torch import Tensor

from tknp.errors import ProtocolError
from tknp.kv.storage import KvStorage
from tknp.transfer.base import Kind
from tknp.transfer.spans import spans
from tknp.transfer.windows import WriteWindows
from tknp.v1.attention_owner_pb2 import KvChunk, WriteResponse


class Published(Protocol):
    """A pool that peers can write into by themselves; see `tknp.transfer.nixl`."""

    @property
    def metadata(self) -> bytes: ...

    def close(self) -> None: ...


class Receiver:
    """The pool of one owner rank as a destination of KV.

    `layers`, `heads`: which global layers and KV heads `storage` holds.
    `nixl_metadata` and `nixl_address` go into this rank's OwnerDescription; without NIXL they are
    empty and 0, and KV comes by gRPC only.
    """

    def __init__(
        self,
        storage: KvStorage,
        layers: range,
        heads: range,
        windows: WriteWindows,
        published: Published | None = None,
    ) -> None:
        self.storage = storage
        self.layers = layers
        self.heads = heads
        self.windows = windows
        self._published = published

    @property
    def kind(self) -> Kind:
        """`nixl`: peers may write into the pool by themselves; else only gRPC chunks arrive."""
        return "nixl" if self._published else "grpc"

    @property
    def nixl_metadata(self) -> bytes:
        return self._published.metadata if self._published else b""

    @property
    def nixl_address(self) -> int:
        return self.storage.data.data_ptr() if self._published else 0

    def apply(self, chunk: KvChunk) -> int:
        """Write one chunk into its pages; returns the bytes of its payload.

        Raises ProtocolError, before anything is written, for a chunk whose window is not open or
        whose layer, heads, pages, slots or length don't fit this pool.
        """
        self.windows.check(chunk.key, chunk.writer, chunk.pages)
        _, _, pages, _, page_size, head_dim = self.storage.shape
        if chunk.layer not in self.layers:
            raise _misfit("layer", chunk.layer, f"layers {_span(self.layers)}")
        if not self.heads.start <= chunk.head_start < chunk.head_stop <= self.heads.stop:
            value = f"[{chunk.head_start}, {chunk.head_stop})"
            raise _misfit("head_start", value, f"KV heads {_span(self.heads)}")
        if not chunk.pages:
            raise _misfit("pages", 0, "name at least one page")
        for page in chunk.pages:
            if page >= pages:
                raise _misfit("pages", page, f"page ids below {pages}")
        if not 0 < chunk.slots <= page_size:
            raise _misfit("slots", chunk.slots, f"1..{page_size} slots of the last page")
        first_page_stop = chunk.slots if len(chunk.pages) == 1 else page_size
        if chunk.first_slot >= first_page_stop:
            raise _misfit("first_slot", chunk.first_slot, f"slots below {first_page_stop}")
        heads = chunk.head_stop - chunk.head_start
        filled = spans(len(chunk.pages), chunk.first_slot, chunk.slots, page_size)
        token_bytes = heads * head_dim * self.storage.data.element_size()
        nbytes = sum(span.tokens for span in filled) * token_bytes
        if len(chunk.data) != nbytes:
            raise _misfit("data", len(chunk.data), f"{nbytes} bytes")

        first = chunk.head_start - self.heads.start
        target = self.storage.layer(chunk.layer - self.layers.start)[chunk.values]
        target = target[:, first : first + heads]
        ids = torch.tensor(chunk.pages, device=target.device)
        offset = 0
        for span in filled:
            rows = self._rows(chunk.data, offset, span.tokens * token_bytes)
            slots = slice(span.first_slot, span.last_slot)
            shape = (-1, heads, span.last_slot - span.first_slot, head_dim)
            target[:, :, slots].index_copy_(0, ids[span.start : span.stop], rows.view(shape))
            offset += span.tokens * token_bytes
        return len(chunk.data)

    def close(self) -> None:
        """Withdraw the pool from NIXL peers; their later writes fail on their side."""
        if self._published:
            self._published.close()
            self._published = None

    def _rows(self, data: bytes, offset: int, nbytes: int) -> Tensor:
        """`nbytes` of `data` as elements of the pool on its device."""
        writable = bytearray(memoryview(data)[offset : offset + nbytes])
        return torch.frombuffer(writable, dtype=self.storage.data.dtype).to(
            self.storage.data.device
        )


async def write(receiver: Receiver, chunks: AsyncIterator[KvChunk]) -> WriteResponse:
    """Body of `AttentionOwner.Write`: apply every chunk of the stream.

    The first chunk that is refused ends the call with its TknpError, once the stream has been read
    to its end: gRPC hides the status of a call from a peer that is still writing.
    """
    received = 0
    refusal: ProtocolError | None = None
    async for chunk in chunks:
        if refusal is None:
            try:
                received += receiver.apply(chunk)
            except ProtocolError as error:
                refusal = error
    if refusal is not None:
        raise refusal
    return WriteResponse(bytes=received)


def _misfit(field: str, value: object, holds: str) -> ProtocolError:
    return ProtocolError(f"KvChunk.{field}={value}: this rank takes {holds}")


def _span(values: range) -> str:
    return f"[{values.start}, {values.stop})"
