"""Whatever a pool file can't say is refused, and each refusal names field and remedy."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tknp.config import pool_from, read_pool
from tknp.errors import InvalidValue

SECURE = {
    "tls_cert": "c.pem",
    "tls_key": "k.pem",
    "tls_ca": "ca.pem",
    "token_file": "token",
    "api_token_file": "api-token",
}


def _refusal(data: Mapping[str, object]) -> InvalidValue:
    with pytest.raises(InvalidValue) as error:
        pool_from(data)
    return error.value


def _node(**changes: object) -> dict[str, object]:
    return {"addresses": ["127.0.0.1:7100"], **changes}


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"dtype": "int8"}, "dtype", "choose one of float32, bfloat16, float16"),
        ({"device": "tpu"}, "device", "choose cpu or cuda"),
        ({"kv_transfer": "ftp"}, "kv_transfer", "choose auto, nixl or grpc"),
        ({"model": 7}, "model", "name a checkpoint"),
        ({"model": None}, "model", "is required"),
        ({"coordinator": "here"}, "coordinator", "write HOST:PORT"),
        ({"data_plane": "here:x"}, "data_plane", "write HOST:PORT"),
        ({"nodes": []}, "nodes", "at least one decode node"),
        ({"nodes": None}, "nodes", "at least one decode node"),
        ({"nodes": "a:1"}, "nodes", "expected a list"),
        ({"nodes": ["a:1"]}, "nodes[0].", "expected a mapping"),
        ({"prefill": []}, "prefill", "at least one prefill replica"),
        ({"prefill": {"a": 1}}, "prefill", "expected a list"),
        ({"prefill": [{"addresses": []}]}, "prefill[0].addresses", "one address a TP rank"),
        ({"prefill": [{"addresses": ["x"]}]}, "prefill[0].addresses", "write HOST:PORT"),
        ({"prefill": [{"addresses": ["a:1", "a:2"]}]}, "prefill[0].data_plane", "HOST:PORT"),
        ({"nodes": [_node(addresses="a:1")]}, "nodes[0].addresses", "expected a list"),
        ({"nodes": [_node(addresses=None)]}, "nodes[0].addresses", "is required"),
        ({"nodes": [_node(addresses=[])]}, "nodes[0].addresses", "one address a TP rank"),
        ({"nodes": [_node(role="boss")]}, "nodes[0].role", "attention-owner"),
        ({"nodes": [_node(), _node(addresses=["x"])]}, "nodes[1].addresses", "write HOST:PORT"),
        ({"nodes": [_node(memory_bytes="big")]}, "nodes[0].memory_bytes", "512MiB or 2GB"),
        ({"nodes": [_node(memory_bytes=0)]}, "nodes[0].memory_bytes", "at least one byte"),
        ({"nodes": [_node(memory_bytes=9), _node()]}, "nodes[].memory_bytes", "every node or on"),
        ({"metrics_address": "here"}, "metrics_address", "write HOST:PORT"),
        ({"metrics_address": "0.0.0.0:1"}, "metrics_address", "would be open to anybody"),
        ({"nodes": [_node(metrics_addresses="a:1")]}, "nodes[0].metrics_addresses", "a list"),
        ({"nodes": [_node(metrics_addresses=["x"])]}, "nodes[0].metrics_addresses", "HOST:PORT"),
        (
            {"prefill": [_node(metrics_addresses=["a:1", "a:2"])]},
            "prefill[0].metrics_addresses",
            "give one a TP rank, 1, or none",
        ),
        ({"kv_memory_bytes": "lots"}, "kv_memory_bytes", "512MiB or 2GB"),
        ({"kv_memory_bytes": 0}, "kv_memory_bytes", "at least one byte"),
        ({"max_model_len": 0}, "max_model_len", "whole number of at least 1"),
        ({"page_size": 1.5}, "page_size", "whole number of at least 1"),
        ({"prefill_chunk": "many"}, "prefill_chunk", "whole number of at least 1"),
        ({"max_batch": -1}, "max_batch", "whole number of at least 1"),
        ({"max_batch": True}, "max_batch", "whole number of at least 1"),
        ({"max_queue": 0}, "max_queue", "whole number of at least 1"),
        ({"epoch": 0}, "epoch", "whole number of at least 1"),
        ({"timeout_s": 0}, "timeout_s", "a number above 0 seconds"),
        ({"timeout_s": float("nan")}, "timeout_s", "a number above 0 seconds"),
        ({"timeout_s": "soon"}, "timeout_s", "a number above 0 seconds"),
        ({"timeout_s": float("inf")}, "timeout_s", "not infinite"),
        ({"lease_s": -1}, "lease_s", "a number above 0 seconds"),
        ({"drain_s": 0}, "drain_s", "a number above 0 seconds"),
        ({"drain_s": float("inf")}, "drain_s", "not infinite"),
        ({"record": 7}, "record", "name a file"),
        ({"hold_until": -1}, "hold_until", "whole number of at least 0"),
        ({"domain_ranks": -1}, "domain_ranks", "whole number of at least 0"),
        ({"strategy": "magic"}, "strategy", "choose one of tknp, dp, tp, pp, dcp, helix"),
        ({"copies": 3}, "copies", "choose 1 or 2"),
        ({"copies": True}, "copies", "choose 1 or 2"),
        ({"microbatches": 0}, "microbatches", "whole number of at least 1"),
        ({"width": 0}, "width", "whole number of at least 1"),
        ({"interleave": 0}, "interleave", "whole number of at least 1"),
        ({"overlap": 0}, "overlap", "whole number of at least 1"),
        ({"reserve_ratio": 1.5}, "reserve_ratio", "number from 0 to 1"),
        ({"reserve_ratio": float("nan")}, "reserve_ratio", "number from 0 to 1"),
        ({"inside": 1}, "inside", "true or false"),
        ({"synthetic_kv": "yes"}, "synthetic_kv", "true or false"),
        ({"lease_s": 3601}, "lease_s", "at most 3600"),
        ({"tls_cert": "c", "tls_key": "k"}, "tls_ca", "give all or none"),
        ({"tls_ca": "a"}, "tls_cert", "give all or none"),
        ({"token_file": ""}, "token_file", "the path of a file"),
        ({"api_token_file": 7}, "api_token_file", "the path of a file"),
        ({"insecure": "no"}, "insecure", "true or false"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refusal_names_field_and_remedy(
    minimal: dict[str, Any], changes: dict[str, object], field: str, remedy: str
) -> None:
    error = _refusal({**minimal, **changes})
    assert error.field == field
    assert remedy in error.remedy
    assert str(error).startswith(f"{field}=")
    assert error.status == "INVALID_ARGUMENT"


# --- exposure ----------------------------------------------------------------------------------

OPEN, CLEAR = "would be open to anybody", "would travel in clear text"


@pytest.mark.parametrize(
    ("changes", "field", "remedy"),
    [
        ({"coordinator": "0.0.0.0:80"}, "coordinator", OPEN),
        ({"coordinator": "[::]:80"}, "coordinator", OPEN),
        ({"coordinator": "gateway.pool:80", "token_file": "t"}, "coordinator", CLEAR),
        ({"coordinator": "10.0.0.1:80", "api_token_file": "t"}, "coordinator", CLEAR),
        ({"nodes": [_node(addresses=["10.0.0.1:80"])]}, "nodes[0].addresses", OPEN),
        ({"nodes": [_node(addresses=["a:80"])], **SECURE, "token_file": None},
         "nodes[0].addresses", OPEN),
        ({"prefill": [_node(addresses=["a:80"])], "token_file": "t"},
         "prefill[0].addresses", CLEAR),
    ],
)  # fmt: skip
def test_a_port_that_others_reach_needs_a_token_and_tls(
    minimal: dict[str, Any], changes: dict[str, object], field: str, remedy: str
) -> None:
    error = _refusal({**minimal, **changes})
    assert error.field == field
    assert remedy in error.remedy
    assert "insecure: true" in error.remedy
    assert pool_from({**minimal, **changes, "insecure": True}).insecure


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"coordinator": "localhost:80"},
        {"coordinator": "[::1]:80"},
        {"coordinator": "127.9.9.9:80", "token_file": "t"},
        {"coordinator": "0.0.0.0:80", **SECURE},
        {"coordinator": "0.0.0.0:80", **SECURE, "token_file": None},
        {"coordinator": "0.0.0.0:80", **SECURE, "api_token_file": None},
        {"nodes": [_node(addresses=["10.0.0.1:80"])], **SECURE},
    ],
)
def test_loopback_is_open_and_what_is_secured_may_be_anywhere(
    minimal: dict[str, Any], changes: dict[str, object]
) -> None:
    pool_from({**minimal, **changes})


def test_unequal_tp_is_refused(minimal: dict[str, Any]) -> None:
    nodes = [{"addresses": ["a:1", "a:2"]}, {"addresses": ["b:1"]}]
    error = _refusal({**minimal, "nodes": nodes})
    assert error.field == "nodes[1].addresses"
    assert error.value == ["b:1"]
    assert error.remedy == "T is one number a pool: give 2 as nodes[0] does"


@pytest.mark.parametrize("name", ["model", "coordinator", "data_plane"])
def test_required_setting_is_named(minimal: dict[str, Any], name: str) -> None:
    error = _refusal({key: value for key, value in minimal.items() if key != name})
    assert (error.field, error.remedy) == (name, "is required")


@pytest.mark.parametrize("list_name", ["nodes", "prefill"])
def test_required_addresses_are_named(minimal: dict[str, Any], list_name: str) -> None:
    error = _refusal({**minimal, list_name: [{}]})
    assert (error.field, error.remedy) == (f"{list_name}[0].addresses", "is required")


def test_metrics_beyond_loopback_take_tls_or_insecure(minimal: dict[str, Any]) -> None:
    node = {"addresses": ["127.0.0.1:2"], "metrics_addresses": ["10.0.0.1:3"]}
    given = {**minimal, "nodes": [node]}
    assert _refusal(given).field == "nodes[0].metrics_addresses"
    tls = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}
    assert pool_from({**given, **tls}).tls_files == ("cert.pem", "key.pem", "ca.pem")
    pool = pool_from({**given, "insecure": True})
    assert pool.tls_files is None
    pool.check_metrics("metrics_address", "10.0.0.1:4")
    with pytest.raises(InvalidValue, match=r"metrics_address=.*would be open to anybody"):
        pool_from(minimal).check_metrics("metrics_address", "10.0.0.1:4")


@pytest.mark.parametrize(
    ("data", "field", "known"),
    [
        ({"modle": "m"}, "modle", "model"),
        ({"nodes": [_node(roll="x")]}, "nodes[0].roll", "role"),
        ({"prefill": [_node(role="x")]}, "prefill[0].role", "data_plane"),
    ],
    ids=["pool", "node", "prefill"],
)
def test_unknown_setting_is_refused_with_the_known_ones(
    minimal: dict[str, Any], data: dict[str, object], field: str, known: str
) -> None:
    error = _refusal({**minimal, **data})
    assert error.field == field
    assert re.search(rf"unknown; known are .*\b{known}\b", error.remedy)


@pytest.mark.parametrize(
    ("content", "remedy"),
    [(None, "cannot be read"), (b"nodes: [", "is not YAML"), (b"\xff\xfe\x00", "is not YAML"),
     (b"- a", "expected a mapping"), (b"", "expected a mapping")],
    ids=["missing", "broken", "binary", "list", "empty"],
)  # fmt: skip
def test_unreadable_file_is_refused(content: bytes | None, remedy: str, tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidValue, match=remedy) as error:
        read_pool(path)
    assert (error.value.field, error.value.value) == ("pool", str(path))
