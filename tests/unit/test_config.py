"""The pool file: it is read back as written, and every refusal names field and remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tknp.config import (
    NodeConfig,
    PoolConfig,
    PrefillConfig,
    check_address,
    parse_bytes,
    pool_from,
    read_pool,
    write_pool,
)
from tknp.errors import InvalidValue

MINIMAL: dict[str, Any] = {
    "model": "some/model",
    "coordinator": "127.0.0.1:7000",
    "data_plane": "127.0.0.1:7001",
    "nodes": [{"addresses": ["127.0.0.1:7100"]}, {"addresses": ["127.0.0.1:7200"]}],
    "prefill": [{"addresses": ["127.0.0.1:7300"]}],
}
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


# --- round trip --------------------------------------------------------------------------------

ports = st.integers(1, 65535)
addresses = st.builds("{}:{}".format, st.sampled_from(["10.0.0.1", "node-3.pool", "[::1]"]), ports)
counts = st.integers(1, 10**12)


@st.composite
def pools(draw: st.DrawFn) -> PoolConfig:
    tp = draw(st.integers(1, 3))
    sized = draw(st.booleans())
    text = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), max_size=12)

    def ranks(count: int) -> tuple[str, ...]:
        return tuple(draw(st.lists(addresses, min_size=count, max_size=count)))

    return PoolConfig(
        model=draw(text.filter(bool)),
        coordinator=draw(addresses),
        data_plane=draw(addresses),
        nodes=tuple(
            NodeConfig(
                ranks(tp),
                draw(st.sampled_from(["decode-node", "decode-root", "attention-owner"])),
                draw(counts) if sized else None,
                ranks(draw(st.sampled_from([0, tp]))),
            )
            for _ in range(draw(st.integers(1, 3)))
        ),
        prefill=tuple(
            PrefillConfig(
                ranks(count),
                draw(addresses) if count > 1 else "",
                ranks(draw(st.sampled_from([0, count]))),
            )
            for count in draw(st.lists(st.integers(1, 2), min_size=1, max_size=2))
        ),
        dtype=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        device=draw(st.sampled_from(["cpu", "cuda"])),
        kv_memory_bytes=draw(st.none() | counts),
        max_model_len=draw(st.none() | counts),
        page_size=draw(st.none() | counts),
        kv_transfer=draw(st.sampled_from(["auto", "nixl", "grpc"])),
        timeout_s=draw(st.floats(1e-3, 1e6)),
        lease_s=draw(st.floats(1e-3, 3600)),
        epoch=draw(counts),
        strategy=draw(st.sampled_from(["tknp", "dp", "tp", "pp", "dcp", "helix"])),
        copies=draw(st.sampled_from([1, 2])),
        microbatches=draw(st.none() | counts),
        width=draw(st.none() | counts),
        reserve_ratio=draw(st.floats(0, 1)),
        interface=draw(text),
        insecure=True,
        **draw(st.sampled_from([{}, SECURE])),
    )


@settings(max_examples=40, deadline=None)
@given(pool=pools())
def test_written_pool_is_read_back(
    pool: PoolConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "pool.yaml"
    write_pool(pool, path)
    assert read_pool(path) == pool


def test_synthetic_kv_needs_no_prefill() -> None:
    assert pool_from({**MINIMAL, "prefill": [], "synthetic_kv": True}).prefill == ()


def test_file_is_plain_yaml_without_unset_values(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    write_pool(pool_from(MINIMAL), path)
    plain = yaml.safe_load(path.read_text())
    assert plain["nodes"][1]["addresses"] == ["127.0.0.1:7200"]
    assert "page_size" not in plain
    assert "memory_bytes" not in plain["nodes"][0]


def test_null_means_unset() -> None:
    assert pool_from({**MINIMAL, "max_batch": None, "timeout_s": None}) == pool_from(MINIMAL)


def test_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "pool.json"
    path.write_text(json.dumps(MINIMAL))
    assert read_pool(path) == pool_from(MINIMAL)


def test_defaults() -> None:
    pool = pool_from(MINIMAL)
    assert pool.tp == 1
    assert pool.dtype == "bfloat16"
    assert pool.nodes[0].role == "decode-node"
    assert pool.tokens_per_page == 64
    assert pool_from({**MINIMAL, "device": "cuda"}).tokens_per_page == 256
    assert pool_from({**MINIMAL, "device": "cuda", "page_size": 16}).tokens_per_page == 16


def test_metrics_addresses_of_ranks() -> None:
    node = {"addresses": ["a:1", "a:2"], "metrics_addresses": ["127.0.0.1:3", "127.0.0.1:4"]}
    replica = {"addresses": ["a:1"], "metrics_addresses": ["127.0.0.1:5"]}
    pool = pool_from({**MINIMAL, "nodes": [node], "prefill": [replica], "insecure": True})
    assert [pool.nodes[0].metrics_address(t) for t in range(2)] == ["127.0.0.1:3", "127.0.0.1:4"]
    assert pool.prefill[0].metrics_address(0) == "127.0.0.1:5"
    without = pool_from(MINIMAL)
    assert without.metrics_address == ""
    assert without.nodes[0].metrics_address(0) == ""
    assert without.prefill[0].metrics_address(0) == ""


def test_metrics_beyond_loopback_take_tls_or_insecure() -> None:
    node = {"addresses": ["127.0.0.1:2"], "metrics_addresses": ["10.0.0.1:3"]}
    given = {**MINIMAL, "nodes": [node]}
    assert _refusal(given).field == "nodes[0].metrics_addresses"
    tls = {"tls_cert": "cert.pem", "tls_key": "key.pem", "tls_ca": "ca.pem"}
    assert pool_from({**given, **tls}).tls_files == ("cert.pem", "key.pem", "ca.pem")
    pool = pool_from({**given, "insecure": True})
    assert pool.tls_files is None
    pool.check_metrics("metrics_address", "10.0.0.1:4")
    with pytest.raises(InvalidValue, match=r"metrics_address=.*would be open to anybody"):
        pool_from(MINIMAL).check_metrics("metrics_address", "10.0.0.1:4")


def test_sizes_are_parsed_wherever_bytes_are_asked_for() -> None:
    nodes = [{**node, "memory_bytes": "2GiB"} for node in MINIMAL["nodes"]]
    pool = pool_from({**MINIMAL, "nodes": nodes, "kv_memory_bytes": "512MiB"})
    assert pool.kv_memory_bytes == 512 * 2**20
    assert {node.memory_bytes for node in pool.nodes} == {2 * 2**30}


def test_overrides_win_where_they_are_set(tmp_path: Path) -> None:
    path = tmp_path / "pool.yaml"
    write_pool(pool_from({**MINIMAL, "max_batch": 8, "max_queue": 9}), path)
    pool = read_pool(path, {"max_batch": 16, "max_queue": None, "kv_memory_bytes": "1GiB"})
    assert (pool.max_batch, pool.max_queue, pool.kv_memory_bytes) == (16, 9, 2**30)


# --- sizes and addresses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (1, 1),
        ("1", 1),
        ("512MiB", 512 * 2**20),
        ("512mib", 512 * 2**20),
        ("512Mi", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("3k", 3_000),
        ("3KiB", 3_072),
        ("1.5GiB", 3 * 2**29),
        ("1TiB", 2**40),
        ("1T", 10**12),
        ("7b", 7),
        (" 4 GB ", 4 * 10**9),
        (2**50, 2**50),
    ],
)
def test_sizes(text: str | int, value: int) -> None:
    assert parse_bytes("memory", text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "2XB",
        "2iB",
        "-1GB",
        "1e9",
        "1,5GB",
        "2 G B",
        "1.GB",
        "nan",
        "0",
        "0.1",
        0,
        -5,
        True,
    ],
)
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(InvalidValue, match=r"512MiB|at least one byte") as error:
        parse_bytes("kv_memory_bytes", text)
    assert error.value.field == "kv_memory_bytes"
    assert error.value.value == text


@pytest.mark.parametrize("address", ["127.0.0.1:1", "host:65535", "[::1]:8080", "a.b-c:80"])
def test_addresses(address: str) -> None:
    assert check_address("coordinator", address) == address


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":80", "host:0", "host:65536", "host:-1", "host:http", "host:²", "80"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidValue, match=r"HOST:PORT with a port in 1\.\.65535") as error:
        check_address("coordinator", address)
    assert error.value.field == "coordinator"


# --- refusals ----------------------------------------------------------------------------------


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
    changes: dict[str, object], field: str, remedy: str
) -> None:
    error = _refusal({**MINIMAL, **changes})
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
    changes: dict[str, object], field: str, remedy: str
) -> None:
    error = _refusal({**MINIMAL, **changes})
    assert error.field == field
    assert remedy in error.remedy
    assert "insecure: true" in error.remedy
    assert pool_from({**MINIMAL, **changes, "insecure": True}).insecure


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
def test_loopback_is_open_and_what_is_secured_may_be_anywhere(changes: dict[str, object]) -> None:
    pool_from({**MINIMAL, **changes})


def test_unequal_tp_is_refused() -> None:
    nodes = [{"addresses": ["a:1", "a:2"]}, {"addresses": ["b:1"]}]
    error = _refusal({**MINIMAL, "nodes": nodes})
    assert error.field == "nodes[1].addresses"
    assert error.value == ["b:1"]
    assert error.remedy == "T is one number a pool: give 2 as nodes[0] does"


@pytest.mark.parametrize("name", ["model", "coordinator", "data_plane"])
def test_required_setting_is_named(name: str) -> None:
    error = _refusal({key: value for key, value in MINIMAL.items() if key != name})
    assert (error.field, error.remedy) == (name, "is required")


@pytest.mark.parametrize("list_name", ["nodes", "prefill"])
def test_required_addresses_are_named(list_name: str) -> None:
    error = _refusal({**MINIMAL, list_name: [{}]})
    assert (error.field, error.remedy) == (f"{list_name}[0].addresses", "is required")


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
    data: dict[str, object], field: str, known: str
) -> None:
    error = _refusal({**MINIMAL, **data})
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
