"""The ports of a gateway, which all its replicas share.

    gateway process   binds HTTP and listens; binds gRPC and does not
        |  the listening socket, over a Unix socket that only this user reaches
    replica A, replica B: accept from one queue; each listens for gRPC beside the others

A connection that comes while one replica takes the place of another waits in the queue, so that an
update refuses nobody. gRPC has no way to be given a socket: there every replica listens on its own
(SO_REUSEPORT, the kernel deals connections out), which is why updates start a replica before they
end one. Both addresses are tried alone first: two gateways never share a port by mistake.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from types import TracebackType

from tknp.errors import InvalidValue, ProtocolError

_BACKLOG = 2048  # connections that wait while no replica accepts
_NAME = "ports"
_TIMEOUT_S = 30.0


class Ports:
    """Holds the ports until closed and hands the HTTP socket to whoever connects to `path`.

    host, http_port, grpc_port   as `GatewaySettings` has them; a grpc_port of 0 is none
    directory                    for the Unix socket; only this user may enter it

    Raises InvalidValue where a port can't be listened on.
    """

    def __init__(self, host: str, http_port: int, grpc_port: int, directory: Path) -> None:
        self.path = str(directory / _NAME)
        with contextlib.ExitStack() as stack:
            http = stack.enter_context(_bind("http_port", host, http_port))
            http.listen(_BACKLOG)
            if grpc_port:
                _bind("grpc_port", host, grpc_port).close()
                stack.enter_context(_bind("grpc_port", host, grpc_port, shared=True))
            door = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            door.bind(self.path)
            door.listen()
            self._held = stack.pop_all()
        self._http, self._door = http, door
        threading.Thread(target=self._hand_out, name="gateway ports", daemon=True).start()

    def __enter__(self) -> Ports:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Give the ports up; replicas keep theirs until they end."""
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # which ends the wait in `accept`
        self._held.close()

    def _hand_out(self) -> None:
        while True:
            try:
                asker, _ = self._door.accept()
            except OSError:  # closed
                return
            with asker, contextlib.suppress(OSError):
                socket.send_fds(asker, [b"."], [self._http.fileno()])


def take_http(path: str) -> socket.socket:
    """The HTTP socket of the gateway whose `Ports` have this `path`; raises ProtocolError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asker:
        asker.settimeout(_TIMEOUT_S)
        try:
            asker.connect(path)
            _, descriptors, _, _ = socket.recv_fds(asker, 1, 1)
        except OSError as error:
            raise ProtocolError(f"the gateway gives no port at {path}: {error}") from error
    if not descriptors:
        raise ProtocolError(f"the gateway gives no port at {path}: it is closing")
    return socket.socket(fileno=descriptors[0])


def _bind(field: str, host: str, port: int, *, shared: bool = False) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind)
        try:
            # Connections in TIME_WAIT are in the way of neither. What has only one of the two is in
            # the way of what has only the other: that is how a second gateway finds the port taken.
            option = socket.SO_REUSEPORT if shared else socket.SO_REUSEADDR
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise InvalidValue(
            field, port, f"can't listen on {host}: {error.strerror}; choose another port or host"
        ) from error
    return bound
