"""The two sides of a KV transfer, whatever moves the bytes.

Life of one push, on one prefill rank:

    open ---> push(layer, start, stop) ... ---> finish      everything is in place at the owners
                     |                     \\--> abort       nothing of this push is in flight
                     \\-- raises as soon as a transfer has failed, so that compute can stop

`open`, `finish`, `abort` and `close` run on the event loop. `push` runs on the compute thread, and
must not run on the event loop: with gRPC it waits for room when the network is slower than compute.
The local pages of the request must stay as they are until `finish` or `abort` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from tknp.transfer.plan import Route
from tknp.v1.common_pb2 import Placement, RequestKey

Kind = Literal["nixl", "grpc"]


class Push(Protocol):
    """The transfer of one request's KV from one prefill rank."""

    def push(self, layer: int, start: int, stop: int) -> None:
        """Send tokens [start, stop) of global `layer`, which are in the local pages now.

        Blocks at most `timeout_s` for room. Raises TknpError once a transfer of this push is known
        to have failed, InvalidValue for tokens outside the local pages, ProtocolError for tokens
        that no owner keeps.
        """

    async def finish(self) -> int:
        """Wait until every byte is in place at the owners; returns the bytes sent.

        Raises TknpError naming the owner and the cause, DeadlineExceeded after `timeout_s` in
        which nothing arrived. Call `abort` after an error.
        """

    async def abort(self) -> None:
        """Stop. Once it has returned nothing of this push is in flight any more. Idempotent.

        Raises TknpError if that can't be said: the owner's pages must then stay quarantined until
        this process is gone. Frames that gRPC had already delivered to the owner's process count
        as arrived; the owner drops them once its window is closed.
        """


class Sender(Protocol):
    """What one prefill rank process sends KV with."""

    @property
    def kind(self) -> Kind: ...

    async def open(
        self,
        key: RequestKey,
        epoch: int,
        writer: str,
        placements: Sequence[Placement],
        owners: Sequence[str],
        pages: Sequence[int],
    ) -> Push:
        """Begin a push of the request `key` whose prompt is in the local `pages`, in order.

        `owners[i]` is the gRPC address of the rank of `placements[i]`, where `writer` has called
        Begin. Raises InvalidValue or ProtocolError for placements that can't be written. With NIXL
        an owner that can't be reached or doesn't fit raises here, with gRPC from the push.
        """

    async def close(self) -> None:
        """Release connections and memory registrations. Every push must have ended."""


class Link(Protocol):
    """A push's way to one owner rank; the same life as a Push."""

    def send(self, layer: int, start: int, stop: int) -> None:
        """As `Push.push`, for what this link's route carries of these tokens."""

    async def finish(self) -> int: ...

    async def abort(self) -> None: ...


class Path(Protocol):
    """One way of moving bytes: makes a Link for each push and owner rank."""

    async def link(
        self,
        key: RequestKey,
        epoch: int,
        writer: str,
        route: Route,
        owner: str,
        pages: Sequence[int],
    ) -> Link: ...

    async def close(self) -> None: ...
