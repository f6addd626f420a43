"""KV by value over `AttentionOwner.Write`: one stream for each push and owner rank.

    compute thread   send: copy of the tokens' slots -> messages of up to 512 KiB -> room -> queue
    event loop       queue -> stream -> owner's `tknp.transfer.receiver.write`

Room is a fixed number of messages between the two, so that a network slower than compute makes
compute wait instead of filling memory.

Failures: an owner that dies ends the stream; the error reaches the next `send` and `finish`. An
owner that refuses a chunk tells so at `finish`. A stream has no total deadline, as its prompt may
take minutes to compute, but each message, and the answer, must get through within `timeout_s`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from grpc import aio

from tknp.errors import DeadlineExceeded, ProtocolError, TknpError, Unavailable
from tknp.kv.storage import KvStorage
from tknp.rpc.channel import connect
from tknp.rpc.status import error_from
from tknp.transfer.plan import Piece, Route, pieces
from tknp.transfer.spans import Span, spans
from tknp.v1.attention_owner_pb2 import KvChunk, WriteResponse
from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerStub
from tknp.v1.common_pb2 import RequestKey

if TYPE_CHECKING:
    from tknp.v1.attention_owner_pb2_grpc import AttentionOwnerAsyncStub

# gRPC moves messages of 2 MiB at a third of this speed, and smaller ones more slowly too.
MESSAGE_BYTES = 512 << 10
MESSAGES_IN_FLIGHT = 32


class GrpcPath:
    """Streams KV out of `storage`; one channel an owner address."""

    def __init__(
        self,
        storage: KvStorage,
        timeout_s: float,
        channel: Callable[[str], aio.Channel] = connect,
    ) -> None:
        self._storage = storage
        self._timeout_s = timeout_s
        self._channel = channel
        self._channels: dict[str, aio.Channel] = {}

    def stub(self, owner: str) -> AttentionOwnerAsyncStub:
        """The service of `owner`, over this path's one channel to it."""
        if owner not in self._channels:
            self._channels[owner] = self._channel(owner)
        return AttentionOwnerStub(self._channels[owner])

    async def link(
        self,
        key: RequestKey,
        epoch: int,
        writer: str,
        route: Route,
        owner: str,
        pages: Sequence[int],
    ) -> GrpcLink:
        header = KvChunk(
            key=key,
            epoch=epoch,
            writer=writer,
            head_start=route.heads.start,
            head_stop=route.heads.stop,
        )
        name = f"{route} at {owner}"
        return GrpcLink(
            self.stub(owner), name, header, route, self._storage, tuple(pages), self._timeout_s
        )

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close(None)
        self._channels.clear()


class GrpcLink:
    """One stream. Made on the event loop; `send` runs on the compute thread."""

    def __init__(
        self,
        stub: AttentionOwnerAsyncStub,
        name: str,
        header: KvChunk,
        route: Route,
        storage: KvStorage,
        pages: tuple[int, ...],
        timeout_s: float,
    ) -> None:
        self._stub = stub
        self._name = name
        self._header = header
        self._route = route
        self._storage = storage
        self._pages = pages
        self._timeout_s = timeout_s
        self._room = threading.Semaphore(MESSAGES_IN_FLIGHT)
        self._queue: asyncio.Queue[KvChunk | None] = asyncio.Queue()
        self._failure: TknpError | None = None
        self._sent_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())

    def send(self, layer: int, start: int, stop: int) -> None:
        found = pieces(self._route, layer, start, stop)
        for chunk in self._chunks(layer, found):
            admitted = self._room.acquire(timeout=self._timeout_s)
            if self._failure:
                self._room.release()
                raise self._failure
            if not admitted:
                raise DeadlineExceeded(
                    f"{self._name} took no KV for {self._timeout_s} s; is it overloaded or frozen?"
                )
            self._loop.call_soon_threadsafe(self._queue.put_nowait, chunk)

    async def finish(self) -> int:
        self._queue.put_nowait(None)
        return await self._task

    async def abort(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail(Unavailable(f"{self._name}: the transfer was aborted"))

    async def _run(self) -> int:
        call = self._stub.Write(None)
        call.add_done_callback(lambda _: self._queue.put_nowait(None))
        try:
            while (chunk := await self._queue.get()) is not None:
                await self._write(call, chunk)
                self._sent_bytes += len(chunk.data)
                self._room.release()
            async with asyncio.timeout(self._timeout_s):
                if not call.done():
                    await call.done_writing()
                received = (await call).bytes
            if received != self._sent_bytes:
                raise ProtocolError(
                    f"{self._name} took {received} of {self._sent_bytes} bytes of KV"
                )
            return self._sent_bytes
        except aio.AioRpcError as error:
            raise self._fail(error_from(error, self._name)) from error
        except TimeoutError:
            raise self._fail(
                DeadlineExceeded(f"{self._name} did not take KV within {self._timeout_s} s")
            ) from None
        except TknpError as error:
            self._fail(error)
            raise
        finally:
            call.cancel()

    async def _write(
        self, call: aio.StreamUnaryCall[KvChunk, WriteResponse], chunk: KvChunk
    ) -> None:
        """Raises Unavailable when the stream is broken; gRPC doesn't tell a writer why."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await call.write(chunk)
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise Unavailable(
                f"{self._name} broke off the stream of KV; its process is gone or has stopped"
            ) from error

    def _fail(self, error: TknpError) -> TknpError:
        """Let the compute thread, now or at its next `send`, see the first error."""
        self._failure = self._failure or error
        self._room.release()
        return self._failure

    def _chunks(self, layer: int, found: list[Piece]) -> Iterator[KvChunk]:
        """The pieces as messages: as many heads of one page as fit, then as many pages."""
        shape = self._storage.shape
        head_bytes = self._storage.run_bytes
        heads = self._route.heads
        step = min(len(heads), max(1, MESSAGE_BYTES // head_bytes))
        pages_each = max(1, MESSAGE_BYTES // (head_bytes * step))
        local = layer - self._route.layers.start + self._route.src_layer
        for values, rows in enumerate(self._storage.layer(local)):
            for first in range(0, len(heads), step):
                count = min(step, len(heads) - first)
                source = rows[:, self._route.src_head + first :][:, :count]
                for i in range(0, len(found), pages_each):
                    group = found[i : i + pages_each]
                    chunk = KvChunk()
                    chunk.CopyFrom(self._header)
                    chunk.layer = layer
                    chunk.values = bool(values)
                    chunk.head_start = heads.start + first
                    chunk.head_stop = heads.start + first + count
                    chunk.pages.extend(piece.dst_page for piece in group)
                    chunk.first_slot = group[0].first_slot
                    chunk.slots = group[-1].last_slot
                    ids = [self._pages[piece.src_page] for piece in group]
                    filled = spans(len(ids), chunk.first_slot, chunk.slots, shape[4])
                    chunk.data = _payload(source, ids, filled)
                    yield chunk


def _payload(source: torch.Tensor, ids: Sequence[int], filled: Sequence[Span]) -> bytes:
    """Bytes of the `filled` slots of pages `ids` of `source`."""
    return b"".join(
        _bytes(
            source[
                torch.tensor(ids[span.start : span.stop], dtype=torch.int64, device=source.device)
            ][:, :, span.first_slot : span.last_slot]
        )
        for span in filled
    )


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().view(torch.uint8)
    return flat.cpu().numpy().tobytes()
