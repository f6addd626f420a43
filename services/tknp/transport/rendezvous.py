"""How the ranks of one epoch find each other: a key-value store that rank (0, 0) hosts.

The hosted store outlives epochs: a rank of the next epoch may arrive before the last transport of
the old one has closed. Keys carry the epoch and the pool's shape, so neither an old epoch's
addresses nor a rank configured for another pool can be met; whoever is missing at the deadline is
named.

The store listens on the given address only, has no authentication and holds socket addresses: it
belongs on loopback or a network that only the pool can reach.
"""

from __future__ import annotations

import socket
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tknp.errors import DeadlineExceeded, InvalidValue
from tknp.layout.rank import Rank

_hosted: dict[str, TCPStore] = {}
_hosted_lock = threading.Lock()


def meet(
    rank: Rank, nodes: int, tp: int, *, store_address: str, epoch: int, timeout_s: float
) -> Store:
    """Return the store of `epoch` once all nodes x tp ranks have come to it.

    Args:
        store_address: `host:port` of rank (0, 0), which hosts the store there.

    Raises:
        DeadlineExceeded: names the ranks that have not come.
        InvalidValue: an address that can't be parsed, or not one of rank (0, 0)'s own host.
    """
    deadline = time.monotonic() + timeout_s
    host, port = _parse(store_address)
    place = f"rendezvous of epoch {epoch} at {store_address}"
    try:
        if rank == Rank(0, 0):
            base = _host(store_address, host, port)
        else:
            base = TCPStore(host, port, None, False, timedelta(seconds=timeout_s), False)
    except RuntimeError as error:
        raise DeadlineExceeded(
            f"{place}: rank (0, 0) does not answer after {timeout_s} s"
        ) from error
    store = PrefixStore(f"tknp/{epoch}/{nodes}x{tp}", base)
    keys = [f"here/{i}" for i in range(nodes * tp)]
    try:
        store.set(keys[rank.index(tp)], "1")
        store.wait(keys, timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError as error:
        absent = ", ".join(str(Rank.from_index(i, tp)) for i in _absent(store, keys))
        raise DeadlineExceeded(
            f"{place}: no sign of ranks {absent or '(the store is gone)'} after {timeout_s} s"
        ) from error
    return store


def _absent(store: Store, keys: list[str]) -> list[int]:
    try:
        return [i for i, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return []


def _host(store_address: str, host: str, port: int) -> TCPStore:
    """The store at `store_address`, started on its first use in this process."""
    with _hosted_lock:
        if store_address not in _hosted:
            # Without a socket of ours the store would listen on every interface.
            try:
                family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
                listener = socket.create_server((host, port), family=family)
            except OSError as error:
                raise InvalidValue(
                    "store_address", store_address,
                    f"rank (0, 0) can't listen there ({error.strerror}); name a free port of an "
                    "address of its own host",
                ) from error  # fmt: skip
            _hosted[store_address] = TCPStore(
                host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
        return _hosted[store_address]


def _parse(store_address: str) -> tuple[str, int]:
    host, _, port = store_address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidValue("store_address", store_address, "must read host:port")
    return host.strip("[]"), int(port)
