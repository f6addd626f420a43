"""Which ports of a pool may be open to whom. Pure: addresses and facts in, refusals out.

loopback     nothing is asked for: whoever can reach it is on this machine already
elsewhere    a token, and TLS so that nobody reads it on its way
insecure     the user says that the network itself keeps others out
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import Protocol

from tknp.errors import InvalidValue

_INSECURE = "or, where the network itself keeps others out, insecure: true"


class Settings(Protocol):
    """The settings of a pool that decide who may call it; all are paths but the last."""

    @property
    def tls_cert(self) -> str | None: ...
    @property
    def tls_key(self) -> str | None: ...
    @property
    def tls_ca(self) -> str | None: ...
    @property
    def token_file(self) -> str | None: ...
    @property
    def api_token_file(self) -> str | None: ...
    @property
    def insecure(self) -> bool: ...


def is_loopback(address: str) -> bool:
    """Whether HOST of `address` (HOST:PORT) can only be reached from its own machine.

    A name other than localhost is taken to be reachable, whatever it resolves to.
    """
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposure(
    settings: Settings, public: tuple[str, str], internal: Iterable[tuple[str, str]]
) -> None:
    """Raise InvalidValue for settings that don't belong together or leave a port open.

    `public`, `internal`: (field name, HOST:PORT) of the coordinator's port and of all others.
    """
    for name in ("tls_cert", "tls_key", "tls_ca", "token_file", "api_token_file"):
        path = getattr(settings, name)
        if path is not None and (not isinstance(path, str) or not path):
            raise InvalidValue(name, path, "give the path of a file")
    if not isinstance(settings.insecure, bool):
        raise InvalidValue("insecure", settings.insecure, "write true or false")
    tls = {name: getattr(settings, name) for name in ("tls_cert", "tls_key", "tls_ca")}
    for name, path in tls.items():
        if path is None and any(tls.values()):
            raise InvalidValue(name, None, f"TLS needs {', '.join(tls)}; give all or none")
    if settings.insecure:
        return
    for field, address in internal:
        _check_port(field, address, bool(settings.tls_ca), settings.token_file, "token_file")
    token = settings.token_file or settings.api_token_file
    _check_port(*public, bool(settings.tls_ca), token, "token_file or api_token_file")


def _check_port(field: str, address: str, tls: bool, token: str | None, wanted: str) -> None:
    if is_loopback(address):
        return
    if token is None:
        raise InvalidValue(
            field, address, f"would be open to anybody: use a loopback address, set {wanted} "
            f"and TLS (tls_cert, tls_key, tls_ca), {_INSECURE}",
        )  # fmt: skip
    if not tls:
        raise InvalidValue(
            field, address, "the token would travel in clear text: set tls_cert, tls_key and "
            f"tls_ca, use a loopback address, {_INSECURE}",
        )  # fmt: skip
