"""From what the user wrote to a target."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tknp_loadgen.errors import FileError, InputError
from tknp_loadgen.target.base import Clock, Target

SCHEMES = ("grpc", "grpcs", "http", "https")


@dataclass(frozen=True)
class TargetSettings:
    """Where requests go: `url` is grpc[s]://HOST:PORT or http[s]://HOST:PORT/v1.

    `ignore_eos` makes answers as long as the trace says; without it a stop is a good end.
    """

    url: str
    model: str = ""
    chat: bool = False
    ignore_eos: bool = True
    chunk_usage: bool = True
    extra: Mapping[str, Any] = field(default_factory=dict)
    token_file: str | None = None
    tls_ca: str | None = None

    def __post_init__(self) -> None:
        scheme, mark, rest = self.url.partition("://")
        if scheme not in SCHEMES or not mark or not rest:
            raise InputError("target", self.url, "must be grpc://HOST:PORT or http://HOST:PORT/v1")
        if scheme.startswith("http") and not self.model:
            raise InputError("model", self.model, "HTTP servers want the name of a model")


def open_target(settings: TargetSettings, clock: Clock) -> Target:
    """A target, not yet connected."""
    scheme, _, address = settings.url.partition("://")
    token = _read(settings.token_file).decode().strip() if settings.token_file else None
    ca = _read(settings.tls_ca) if settings.tls_ca else None
    secure = scheme in ("grpcs", "https")
    tls = ssl.create_default_context(cadata=ca.decode() if ca else None) if secure else None
    if scheme.startswith("grpc"):
        from tknp_loadgen.target.tknp_grpc import TknpGrpc

        return TknpGrpc(address, clock, tls, token, settings.ignore_eos)
    from tknp_loadgen.target.openai_http import HttpSettings, OpenAiHttp

    return OpenAiHttp(
        HttpSettings(settings.url, settings.model, settings.chat, settings.ignore_eos,
                     settings.chunk_usage, token, tls, settings.extra), clock,
    )  # fmt: skip


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise FileError(path, 0, f"can't be read: {error}") from error
