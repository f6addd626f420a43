"""Choice of how KV travels.

auto   NIXL where it can be used on both sides, gRPC for the rest
nixl   NIXL or an error that names the remedy
grpc   gRPC
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from grpc import aio

from tknp.config import KvTransfer
from tknp.errors import InvalidValue, TknpError, Unavailable
from tknp.kv.storage import KvStorage
from tknp.model.shard import Shard
from tknp.rpc.channel import connect
from tknp.transfer.base import Path, Sender
from tknp.transfer.grpc_stream import GrpcPath
from tknp.transfer.nixl import NixlPath, NixlPool
from tknp.transfer.receiver import Receiver
from tknp.transfer.sender import RoutedSender
from tknp.transfer.windows import WriteWindows
from tknp.v1.common_pb2 import Compatibility

_log = logging.getLogger(__name__)


def make_sender(
    kind: KvTransfer,
    storage: KvStorage,
    shard: Shard,
    compatibility: Compatibility,
    *,
    timeout_s: float = 10.0,
    channel: Callable[[str], aio.Channel] = connect,
) -> Sender:
    """The sender of a prefill rank that computes `shard` into `storage`.

    `compatibility`: its own, see `tknp.transfer.compatibility`. `timeout_s`: longest wait for a
    peer without progress. `sender.kind` says which way was chosen. Raises InvalidValue if
    `storage` is not that of `shard`, Unavailable if `kind` is nixl and it can't be used.
    """
    _check_storage(storage, shard.layers, shard.kv_heads)
    page_size = storage.shape[4]
    grpc = GrpcPath(storage, timeout_s, channel)
    if kind != "grpc":
        try:
            path: Path = NixlPath(storage, compatibility, timeout_s, grpc, kind == "auto")
            return RoutedSender("nixl", path, shard, page_size)
        except Unavailable as error:
            _give_up_nixl(kind, error)
    return RoutedSender("grpc", grpc, shard, page_size)


def make_receiver(
    kind: KvTransfer,
    storage: KvStorage,
    layers: range,
    heads: range,
    windows: WriteWindows,
) -> Receiver:
    """The pool of an owner rank, which holds global `layers` and KV `heads`, as a destination.

    gRPC chunks are always accepted; `receiver.kind` says whether NIXL writes are too. Raises as
    `make_sender` does.
    """
    _check_storage(storage, layers, heads)
    if kind != "grpc":
        try:
            return Receiver(storage, layers, heads, windows, NixlPool(storage))
        except Unavailable as error:
            _give_up_nixl(kind, error)
    return Receiver(storage, layers, heads, windows)


def _check_storage(storage: KvStorage, layers: range, heads: range) -> None:
    """Raise InvalidValue unless `storage` has as many layers and heads."""
    for field, wanted, index in (("layers", layers, 0), ("kv_heads", heads, 3)):
        if storage.shape[index] != len(wanted):
            raise InvalidValue(
                f"storage.{field}", storage.shape[index], f"must be {len(wanted)}, as the rank's"
            )


def _give_up_nixl(kind: KvTransfer, error: TknpError) -> None:
    if kind == "nixl":
        raise error
    _log.warning("KV travels by gRPC: %s", error)
