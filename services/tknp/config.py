"""Configuration of a pool: one file that every process of it reads.

    flags > environment (TKNP_*) > file > defaults

The file is YAML (JSON is YAML too). `tknp up` writes one for the processes it starts; in a cluster
it is a ConfigMap. Every process derives the same layout from it with `tknp.layout`, so nothing but
this file has to be agreed upon.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from tknp.errors import InvalidValue
from tknp.exposure import check_exposure, is_loopback
from tknp.model.config import DType, check_dtype

Role = Literal["decode-node", "decode-root", "attention-owner"]
KvTransfer = Literal["auto", "nixl", "grpc"]
DataPlane = Literal["auto", "distributed", "shared_memory"]
StrategyName = Literal["tknp", "dp", "tp", "pp", "dcp", "helix"]
LONGEST_LEASE_S = 3600.0
_MAY_BE_UNSET = ("max_model_len", "page_size", "kv_memory_bytes", "microbatches", "width")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip


def parse_bytes(field_name: str, text: str | int) -> int:
    """`512MiB`, `2GB`, `1073741824` -> bytes; raises InvalidValue naming `field_name`."""
    if isinstance(text, int) and not isinstance(text, bool):
        value = text
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
        if not match or match[2] not in _UNITS:
            raise InvalidValue(field_name, text, "write a size such as 512MiB or 2GB")
        value = int(float(match[1]) * _UNITS[match[2]])
    if value < 1:
        raise InvalidValue(field_name, text, "must be at least one byte")
    return value


def check_address(field_name: str, address: str) -> str:
    """Return `address` if it is HOST:PORT; raises InvalidValue naming `field_name`."""
    host, _, port = str(address).rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise InvalidValue(field_name, address, "write HOST:PORT with a port in 1..65535")
    return str(address)


@dataclass(frozen=True)
class NodeConfig:
    """A decode node: one address for each of its TP ranks, rank 0 first.

    `memory_bytes`: weights plus KV on each rank. Unset: `PoolConfig.kv_memory_bytes` decides.
    `metrics_addresses`: where each rank serves its metrics; empty: nowhere.
    """

    addresses: tuple[str, ...]
    role: Role = "decode-node"
    memory_bytes: int | None = None
    metrics_addresses: tuple[str, ...] = ()

    def metrics_address(self, t: int) -> str:
        """Where TP rank `t` serves its metrics; empty: nowhere."""
        return self.metrics_addresses[t] if self.metrics_addresses else ""


@dataclass(frozen=True)
class PrefillConfig:
    """A prefill replica: one address for each of its TP ranks, rank 0 first.

    `data_plane`: HOST:PORT where the ranks meet; needed from two ranks on.
    `metrics_addresses`: as those of a node.
    """

    addresses: tuple[str, ...]
    data_plane: str = ""
    metrics_addresses: tuple[str, ...] = ()

    def metrics_address(self, t: int) -> str:
        """Where TP rank `t` serves its metrics; empty: nowhere."""
        return self.metrics_addresses[t] if self.metrics_addresses else ""


@dataclass(frozen=True)
class PoolConfig:
    """Everything that the processes of one pool must agree on.

    `kv_memory_bytes`: KV cache on each rank of each node; unset: measured, see `tknp.kv.size`.
    `max_model_len`: prompt plus output in tokens; unset: what the checkpoint declares.
    `page_size`: tokens; unset: 64 on CPU, 256 on CUDA.
    `timeout_s`: longest wait for a peer in one operation on the data plane.
    `tls_cert`, `tls_key`, `tls_ca`: PEM files; between services both sides show a certificate.
    `token_file`: holds the services' bearer token; `api_token_file`: another for public clients.
    `insecure`: ports beyond loopback may do without. See docs/security.md.
    `drain_s`: how long open requests may go on once the coordinator is told to stop.
    `served_model_name`: what clients call the model; empty: the name of its file or directory.
    `record`: file that the coordinator writes its scheduling to; empty: none.
    `max_batch`: rows of a step; each stream has as many.
    `strategy`, `copies`, `microbatches`: how the pool divides a model, see docs/strategies.md;
    microbatches unset: the strategy's own number.
    `domain_ranks`: ranks of one NVLink domain, node by node; 0: those of a node. `inside`: rank by
    rank instead, so that a domain holds the sequence shards of some heads (dcp).
    `width`: most nodes that divide the KV of one request (tknp); unset: all that keep any.
    `interleave`: generated tokens that one of several owners takes before the next one's turn.
    `overlap`: groups of rows whose exchange runs under the attention of the next (helix); 1: none.
    `reserve_ratio`: part of a request's output whose KV is reserved when it is placed. Below 1
    requests grow as they run, onto further nodes too, and the youngest makes room where none is.

    For benchmarks of decode alone:
    `hold_until`: requests wait until so many have come and all that fit are ready, then join in
    one step; 0: never.
    `synthetic_kv`: prompts are not computed. Pages hold pseudo-random values from the start, so
    that a request is ready as soon as it is placed; its tokens mean nothing. Needs no prefill.
    `metrics_address`: where the coordinator serves its metrics; empty: nowhere.
    """

    model: str
    coordinator: str
    data_plane: str
    nodes: tuple[NodeConfig, ...]
    prefill: tuple[PrefillConfig, ...]
    dtype: DType = "bfloat16"
    device: Literal["cpu", "cuda"] = "cpu"
    kv_memory_bytes: int | None = None
    max_model_len: int | None = None
    page_size: int | None = None
    kv_transfer: KvTransfer = "auto"
    transport: DataPlane = "auto"
    prefill_chunk: int = 512
    max_batch: int = 256
    max_queue: int = 1024
    timeout_s: float = 10.0
    lease_s: float = 30.0
    drain_s: float = 30.0
    record: str = ""
    strategy: StrategyName = "tknp"
    copies: int = 1
    microbatches: int | None = None
    domain_ranks: int = 0
    inside: bool = False
    width: int | None = None
    interleave: int = 16
    overlap: int = 1
    reserve_ratio: float = 1.0
    hold_until: int = 0
    synthetic_kv: bool = False
    epoch: int = 1
    interface: str = field(default="")
    served_model_name: str = ""
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None
    token_file: str | None = None
    api_token_file: str | None = None
    insecure: bool = False
    metrics_address: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise InvalidValue("model", self.model, "name a checkpoint")
        check_dtype("dtype", self.dtype)
        if self.device not in ("cpu", "cuda"):
            raise InvalidValue("device", self.device, "choose cpu or cuda")
        if self.kv_transfer not in get_args(KvTransfer):
            raise InvalidValue("kv_transfer", self.kv_transfer, "choose auto, nixl or grpc")
        if self.transport not in get_args(DataPlane):
            known = ", ".join(get_args(DataPlane))
            raise InvalidValue("transport", self.transport, f"choose one of {known}")
        check_address("coordinator", self.coordinator)
        check_address("data_plane", self.data_plane)
        if not self.nodes:
            raise InvalidValue("nodes", [], "name at least one decode node")
        if not self.prefill and not self.synthetic_kv:
            raise InvalidValue("prefill", [], "name at least one prefill replica")
        for i, node in enumerate(self.nodes):
            if node.role not in get_args(Role):
                raise InvalidValue(f"nodes[{i}].role", node.role, f"choose {get_args(Role)}")
            if not node.addresses:
                raise InvalidValue(f"nodes[{i}].addresses", [], "give one address a TP rank")
            if len(node.addresses) != self.tp:
                raise InvalidValue(
                    f"nodes[{i}].addresses", list(node.addresses),
                    f"T is one number a pool: give {self.tp} as nodes[0] does",
                )  # fmt: skip
            for address in node.addresses:
                check_address(f"nodes[{i}].addresses", address)
            self._check_metrics(f"nodes[{i}]", node)
        for i, replica in enumerate(self.prefill):
            if not replica.addresses:
                raise InvalidValue(f"prefill[{i}].addresses", [], "give one address a TP rank")
            for address in replica.addresses:
                check_address(f"prefill[{i}].addresses", address)
            if len(replica.addresses) > 1:
                check_address(f"prefill[{i}].data_plane", replica.data_plane)
            self._check_metrics(f"prefill[{i}]", replica)
        if self.metrics_address:
            self.check_metrics("metrics_address", self.metrics_address)
        for name in ("max_model_len", "page_size", "kv_memory_bytes", "width", "prefill_chunk",
                     "max_batch", "max_queue", "epoch", "microbatches", "interleave",
                     "overlap"):  # fmt: skip
            value = getattr(self, name)
            if value is None and name in _MAY_BE_UNSET:
                continue
            if type(value) is not int or value < 1:
                raise InvalidValue(name, value, "must be a whole number of at least 1")
        self._check_strategy()
        if not isinstance(self.record, str):
            raise InvalidValue("record", self.record, "name a file")
        if not isinstance(self.served_model_name, str):
            raise InvalidValue("served_model_name", self.served_model_name, "a name")
        for name in ("timeout_s", "lease_s", "drain_s"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise InvalidValue(name, value, "must be a number above 0 seconds, not infinite")
        if self.lease_s > LONGEST_LEASE_S:
            raise InvalidValue("lease_s", self.lease_s, f"must be at most {LONGEST_LEASE_S}")
        ranks = [(f"nodes[{i}].addresses", node.addresses) for i, node in enumerate(self.nodes)]
        ranks += [(f"prefill[{i}].addresses", p.addresses) for i, p in enumerate(self.prefill)]
        internal = [(name, address) for name, addresses in ranks for address in addresses]
        check_exposure(self, ("coordinator", self.coordinator), internal)
        memories = [n.memory_bytes is not None for n in self.nodes]
        if any(memories) and not all(memories):
            raise InvalidValue("nodes[].memory_bytes", memories, "set it on every node or on none")

    @property
    def tp(self) -> int:
        """TP degree T: one number for the whole pool."""
        return len(self.nodes[0].addresses)

    @property
    def tls_files(self) -> tuple[str, str, str] | None:
        """Certificate, key and CA; None without TLS."""
        if self.tls_cert and self.tls_key and self.tls_ca:
            return self.tls_cert, self.tls_key, self.tls_ca
        return None

    def check_metrics(self, field_name: str, address: str) -> None:
        """Raise InvalidValue unless metrics may be served at `address`."""
        check_address(field_name, address)
        if not (is_loopback(address) or self.tls_files or self.insecure):
            raise InvalidValue(
                field_name, address, "would be open to anybody: use a loopback address, set "
                "tls_cert, tls_key and tls_ca, or, where the network itself keeps others out, "
                "insecure: true",
            )  # fmt: skip

    def _check_strategy(self) -> None:
        """What can be said without the model; the layout refuses the rest."""
        if self.strategy not in get_args(StrategyName):
            known = ", ".join(get_args(StrategyName))
            raise InvalidValue("strategy", self.strategy, f"choose one of {known}")
        if self.copies not in (1, 2) or type(self.copies) is not int:
            raise InvalidValue("copies", self.copies, "choose 1 or 2")
        for name in ("hold_until", "domain_ranks"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise InvalidValue(name, value, "must be a whole number of at least 0")
        if type(self.reserve_ratio) not in (int, float) or not 0 <= self.reserve_ratio <= 1:
            raise InvalidValue("reserve_ratio", self.reserve_ratio, "must be a number from 0 to 1")
        for name in ("inside", "synthetic_kv"):
            if type(getattr(self, name)) is not bool:
                raise InvalidValue(name, getattr(self, name), "must be true or false")

    def _check_metrics(self, path: str, group: NodeConfig | PrefillConfig) -> None:
        given, ranks = group.metrics_addresses, len(group.addresses)
        if given and len(given) != ranks:
            raise InvalidValue(
                f"{path}.metrics_addresses", list(given), f"give one a TP rank, {ranks}, or none"
            )
        for address in given:
            self.check_metrics(f"{path}.metrics_addresses", address)

    @property
    def tokens_per_page(self) -> int:
        return self.page_size or (64 if self.device == "cpu" else 256)


def _build(cls: type[Any], path: str, data: object) -> Any:
    if not isinstance(data, Mapping):
        raise InvalidValue(path or "file", data, "expected a mapping of settings")
    known = {f.name: f for f in dataclasses.fields(cls)}
    for key in data:
        if key not in known:
            raise InvalidValue(f"{path}{key}", data[key], f"unknown; known are {', '.join(known)}")
    values = {key: value for key, value in data.items() if value is not None}
    for name, f in known.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise InvalidValue(f"{path}{name}", None, "is required")
    for key in ("kv_memory_bytes", "memory_bytes"):
        if key in values:
            values[key] = parse_bytes(f"{path}{key}", values[key])
    for key in ("addresses", "metrics_addresses"):
        if key in values:
            if not isinstance(values[key], list | tuple):
                raise InvalidValue(f"{path}{key}", values[key], "expected a list")
            values[key] = tuple(values[key])
    return cls(**values)


def pool_from(data: Mapping[str, object]) -> PoolConfig:
    """Build a PoolConfig from plain data; raises InvalidValue naming the field and the remedy."""
    values = dict(data)
    for key, cls in (("nodes", NodeConfig), ("prefill", PrefillConfig)):
        items = values.get(key) or ()
        if not isinstance(items, list | tuple):
            raise InvalidValue(key, items, "expected a list")
        values[key] = tuple(_build(cls, f"{key}[{i}].", item) for i, item in enumerate(items))
    pool: PoolConfig = _build(PoolConfig, "", values)
    return pool


def read_pool(path: Path, overrides: Mapping[str, object] | None = None) -> PoolConfig:
    """Read a pool file; `overrides` (flags, environment) win over it where they are not None."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InvalidValue("pool", str(path), f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidValue("pool", str(path), f"is not YAML: {error}") from error
    if not isinstance(data, Mapping):
        raise InvalidValue("pool", str(path), "expected a mapping of settings")
    merged = {**data, **{k: v for k, v in (overrides or {}).items() if v is not None}}
    return pool_from(merged)


def write_pool(pool: PoolConfig, path: Path) -> None:
    """Write `pool` so that `read_pool` gives it back."""
    path.write_text(yaml.safe_dump(_plain(dataclasses.asdict(pool)), sort_keys=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value
