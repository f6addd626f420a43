"""What every connection to a server is set to."""

from __future__ import annotations

import asyncio
import socket

# A host that vanishes is noticed within a minute: by probes, or by data that is not acknowledged.
_IDLE_S, _INTERVAL_S, _PROBES, _UNACKNOWLEDGED_MS = 30, 10, 3, 60_000


def prepare(transport: asyncio.WriteTransport) -> None:
    """Write at once, and notice when the other side is gone."""
    # uvloop collects writes until the end of a turn of its loop unless the limit is 0; nothing is
    # ever paused, because requests are small beside what a socket takes.
    transport.set_write_buffer_limits(0)
    sock = transport.get_extra_info("socket")
    if sock is None:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _INTERVAL_S), ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", _UNACKNOWLEDGED_MS),
    ):  # fmt: skip
        if hasattr(socket, name):  # others than Linux lack some of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
