"""What a gateway is told: pools, ports, limits. Read once at start, validated, never changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from tknp.config import check_address
from tknp.errors import InvalidValue
from tknp.exposure import is_loopback

_DNS = "dns:"


def check_target(field_name: str, target: str) -> str:
    """HOST:PORT, or dns:HOST:PORT for every address that HOST has; raises InvalidValue."""
    if target.startswith(_DNS):
        return _DNS + check_address(field_name, target.removeprefix(_DNS))
    return check_address(field_name, target)


@dataclass(frozen=True)
class GatewaySettings:
    """Settings of every replica of one gateway.

    pools                coordinators, HOST:PORT or dns:HOST:PORT (all addresses of a headless
                         service); a pool serves the model that it says it does
    http_host, http_port   where HTTP listens
    grpc_port            of gRPC, on the same host and with the same TLS; 0: off
    min_replicas, max_replicas        of the gateway, scaled by requests in flight
    tls_ca               PEM file to trust at pools; unset: plain text
    token_file           bearer token that pools ask of clients
    keys_file            API keys, see `tknp.gateway.keys`; unset: no key is asked for
    http_cert, http_key, http_client_ca   TLS of both ports; the last asks clients for theirs
    insecure             a host beyond loopback may do without TLS and keys
    max_body_bytes       of an HTTP request
    max_prompt_tokens    longest prompt; unset: what the pool takes
    max_output_tokens    asked for where a chat request names no limit, as far as there is room
    max_inflight         requests of one replica, more are answered 429
    timeout_s            longest life of a request; a request may ask for less
    drain_s              how long open streams may go on after SIGTERM; a replica that Serve takes
                         away in an update has `timeout_s`
    log_file             JSON lines of every replica are appended to it; unset: standard error,
                         which Ray keeps in the log of the worker
    replays              how often a stream that lost its pool is submitted again; 0: never
    replay_wait_s        how long such a stream waits for a pool
    hold_s               how long a new request waits for a pool of its model; 0: it is refused
    max_held             new requests of one replica that wait so, more are answered 503
    """

    pools: tuple[str, ...]
    http_host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 0
    min_replicas: int = 1
    max_replicas: int = 4
    tls_ca: str | None = None
    token_file: str | None = None
    keys_file: str | None = None
    http_cert: str | None = None
    http_key: str | None = None
    http_client_ca: str | None = None
    insecure: bool = False
    max_body_bytes: int = 8 << 20
    max_prompt_tokens: int | None = None
    max_output_tokens: int = 1024
    max_inflight: int = 1024
    timeout_s: float = 3600.0
    drain_s: float = 60.0
    log_file: str | None = None
    replays: int = 3
    replay_wait_s: float = 120.0
    hold_s: float = 0.0
    max_held: int = 256

    def __post_init__(self) -> None:
        if not self.pools:
            raise InvalidValue("pools", [], "name at least one coordinator, HOST:PORT")
        for index, target in enumerate(self.pools):
            if not isinstance(target, str):
                raise InvalidValue(f"pools[{index}]", target, "write HOST:PORT")
            check_target(f"pools[{index}]", target)
        if not isinstance(self.http_host, str) or not self.http_host:
            raise InvalidValue("http_host", self.http_host, "name an address to listen on")
        for name, low in (("http_port", 1), ("grpc_port", 0)):
            self._whole(name, low, 65535)
        if self.grpc_port == self.http_port:
            raise InvalidValue("grpc_port", self.grpc_port, "http_port has it; 0 for none")
        for name in ("min_replicas", "max_body_bytes", "max_output_tokens", "max_inflight",
                     "max_held"):  # fmt: skip
            self._whole(name, 1, None)
        self._whole("max_replicas", self.min_replicas, None)
        self._whole("replays", 0, None)
        if self.max_prompt_tokens is not None:
            self._whole("max_prompt_tokens", 1, None)
        for name in ("timeout_s", "replay_wait_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise InvalidValue(name, value, "must be a number above 0 seconds, not infinite")
        for name in ("drain_s", "hold_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value < float("inf"):
                raise InvalidValue(name, value, "must be a number of seconds, 0 for none")
        if bool(self.http_cert) != bool(self.http_key):
            raise InvalidValue("http_cert", self.http_cert, "give http_cert and http_key together")
        if self.http_client_ca and not self.http_cert:
            raise InvalidValue("http_client_ca", self.http_client_ca, "needs http_cert")
        closed = is_loopback(f"{self.http_host}:{self.http_port}")
        if not closed and not self.insecure and not (self.keys_file and self.http_cert):
            raise InvalidValue(
                "http_host", self.http_host, "would be open to anybody: give keys_file, http_cert "
                "and http_key, or, where the network itself keeps others out, insecure: true",
            )  # fmt: skip

    def _whole(self, name: str, low: int, high: int | None) -> None:
        value = getattr(self, name)
        if type(value) is not int or value < low or (high is not None and value > high):
            limit = f"of at least {low}" if high is None else f"in {low}..{high}"
            raise InvalidValue(name, value, f"must be a whole number {limit}")


def settings_from(data: Mapping[str, object]) -> GatewaySettings:
    """Settings from plain data; raises InvalidValue naming field, value and remedy."""
    known = {f.name for f in dataclasses.fields(GatewaySettings)}
    for name in data:
        if name not in known:
            raise InvalidValue(name, data[name], f"unknown; known are {', '.join(sorted(known))}")
    values = {name: value for name, value in data.items() if value is not None}
    given = values.get("pools", ())
    if not isinstance(given, list | tuple):
        raise InvalidValue("pools", given, "expected a list")
    values["pools"] = tuple(given)
    return GatewaySettings(**values)  # type: ignore[arg-type]


def settings_from_text(args: Mapping[str, object]) -> GatewaySettings:
    """As `settings_from`, for values that may be text. `settings`: a file that has the others."""
    given = dict(args)
    path = given.pop("settings", None)
    values = dict(_read(Path(str(path)))) if path is not None else {}
    for name, value in given.items():
        values[name] = _plain(name, value) if isinstance(value, str) else value
    return settings_from(values)


def _plain(name: str, text: str) -> object:
    """The value that `text` stands for where another type than text is expected."""
    if name == "pools":
        return text.split(",")
    kinds = {f.name: str(f.type) for f in dataclasses.fields(GatewaySettings)}
    return text if kinds.get(name, "str").startswith("str") else yaml.safe_load(text)


def read_settings(path: Path) -> GatewaySettings:
    """Read a YAML file of settings."""
    return settings_from(_read(path))


def _read(path: Path) -> Mapping[str, object]:
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidValue("settings", str(path), f"cannot be read: {error}") from error
    if not isinstance(data, Mapping):
        raise InvalidValue("settings", str(path), "expected a mapping of settings")
    return data
