"""Files that hold secrets and certificates. Errors name the file, never what is in it."""

from __future__ import annotations

import ssl
from pathlib import Path

from tknp.errors import InvalidValue

LEAST_TOKEN_CHARACTERS = 16


def read_token(name: str, path: str) -> str:
    """The token in a file, without the white space around it. Raises InvalidValue for `name`."""
    try:
        token = _read(name, path).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if len(token) < LEAST_TOKEN_CHARACTERS or not token.isprintable() or " " in token:
        raise InvalidValue(
            name, path, f"must hold one token of at least {LEAST_TOKEN_CHARACTERS} ASCII "
            "characters; make one with: openssl rand -hex 32",
        )  # fmt: skip
    return token


def read_ca(name: str, path: str) -> bytes:
    """Certificates to trust. Raises InvalidValue for `name`."""
    data = _read(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidValue(name, path, "must hold PEM certificates") from error
    return data


def read_pair(cert: str, key: str, prefix: str = "tls") -> tuple[bytes, bytes]:
    """The files of a certificate and its key, which settings call PREFIX_cert and PREFIX_key.

    Raises InvalidValue unless they belong together.
    """
    pair = _read(f"{prefix}_cert", cert), _read(f"{prefix}_key", key)
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        raise InvalidValue(
            f"{prefix}_key", key, f"must be the unencrypted PEM key of the certificate in {cert}"
        ) from error
    return pair


def _read(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidValue(name, path, f"cannot be read: {error.strerror}") from error
