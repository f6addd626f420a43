"""Free TCP ports on this machine for processes about to start."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack, suppress
from pathlib import Path

from tknp.errors import InvalidValue, Unavailable

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST, HIGHEST = 10_000, 32_767
ATTEMPTS_A_PORT = 50
_given: set[int] = set()  # in this process: who asked may not listen yet


def highest_safe_port() -> int:
    """Below the range that the kernel gives to outgoing connections.

    A port from that range may be taken by a connection of an earlier child before the child that
    should listen on it gets there.
    """
    with suppress(OSError, ValueError, IndexError):
        first = int(EPHEMERAL_RANGE.read_text().split()[0])
        if first > LOWEST + 1000:
            return min(HIGHEST, first - 1)
    return HIGHEST


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do, so that a connection in TIME_WAIT does not make a port look taken. Without
        # SO_REUSEPORT: two gRPC servers would share a port and its requests silently.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(1)
    except OSError:
        listener.close()
        raise
    return listener


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` distinct ports that nobody listens on, none given before while others are left.

    Raises Unavailable when there are none.
    """
    highest = highest_safe_port()
    if len(_given) + count > (highest - LOWEST) // 2:
        _given.clear()
    ports: list[int] = []
    with ExitStack() as held:
        for _ in range(count * ATTEMPTS_A_PORT):
            if len(ports) == count:
                break
            port = LOWEST + secrets.randbelow(highest - LOWEST + 1)
            if port in _given:
                continue
            with suppress(OSError):
                held.enter_context(_bind(host, port))
                ports.append(port)
                _given.add(port)
    if len(ports) < count:
        raise Unavailable(f"found {len(ports)} free ports of {count} in {LOWEST}..{highest}")
    return ports


def check_free(field: str, host: str, port: int) -> int:
    """Return `port`; raises InvalidValue when `host` can't be listened on at it."""
    try:
        _bind(host, port).close()
    except OSError as error:
        raise InvalidValue(
            field, port,
            f"can't listen on {host}: {error.strerror}; choose another port, or 0 for a free one",
        ) from error  # fmt: skip
    return port
